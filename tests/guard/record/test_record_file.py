"""The file of a flight record: nothing that ends its writer loses more than a step."""

import math
import os
import random
import resource
import signal
import threading
from array import array

import pytest
from flight_records import append_step, head_lines, packed, step_line

from overflow_fast import RecordError, read_record
from overflow_fast.guard.files.json_text import line_bytes
from overflow_fast.guard.record.columns import read_numbers
from overflow_fast.guard.record.folding import fold
from overflow_fast.guard.record.record_file import RecordFile
from overflow_fast.guard.record.record_lines import COLUMNS, Columns

SMALL = 30_000  # bytes: about 100 steps
NAN, INF = math.nan, math.inf


def record_file(path, num_full=20, max_bytes=SMALL):
    return RecordFile(path, num_full, max_bytes)


def write(path, count, **arguments):
    file = record_file(path, **arguments)
    for number in range(count):
        append_step(file, number)
        if file._thread is not None:
            file._thread.join()  # as if a step took its time
    file.close()
    return file


def numbers_of(record):
    """All steps that a record tells of, one by one."""
    return [n for step in record.steps for n in range(step.first, step.last + 1)]


def test_what_was_appended_is_read(tmp_path):
    write(tmp_path / "run.ofr", 3)
    record = read_record(tmp_path / "run.ofr")
    assert [step.first for step in record.steps] == [0, 1, 2]
    assert record.values["abs_max"].tolist() == [[0.0] * 4, [1.0] * 4, [2.0] * 4]
    assert record.steps[1].guard_share == 0.25
    assert not record.is_truncated and not record.num_damaged


# When the process ends.


def killed_writer(path, num_bytes):
    """Kills a process after it has told of some steps; returns of how many it had."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            file, number = record_file(path), 0
            while True:
                append_step(file, number)
                os.write(tell, b".")
                number += 1
        finally:
            os._exit(1)
    os.close(tell)
    count = 0
    while count < num_bytes and (data := os.read(told, num_bytes - count)):
        count += len(data)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while rest := os.read(told, 4096):
        count += len(rest)
    os.close(told)
    return count


@pytest.mark.slow
def test_a_writer_that_is_killed_loses_no_step_that_it_had_appended(tmp_path):
    chance = random.Random(0)
    for i in range(15):
        path = tmp_path / f"{i}.ofr"
        appended = killed_writer(path, chance.randrange(1, 200))
        numbers = numbers_of(read_record(path))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= appended > 0


def test_a_file_that_ends_anywhere_in_a_line_has_all_steps_before_it(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 3)
    whole = path.read_bytes()
    begin = whole[:-1].rindex(b"\n") + 1
    for end in range(begin, len(whole), 5):
        path.write_bytes(whole[:end])
        record = read_record(path)
        assert numbers_of(record) == [0, 1]
        assert record.is_truncated == (end > begin)


def test_any_beginning_of_a_file_can_be_read(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 1)
    whole = path.read_bytes()
    for end in range(0, len(whole), 17):
        path.write_bytes(whole[:end])
        assert numbers_of(read_record(path)) == []


def test_a_damaged_line_costs_that_line(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b"\0" * 40 + b"\n"  # a hole, as a server that was lost leaves one
    path.write_bytes(b"".join(lines))
    record = read_record(path)
    assert numbers_of(record) == [0, 2]
    assert record.num_damaged == 1


def test_entries_whose_line_was_damaged_are_of_no_known_kind(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * 40 + b"\n"
    path.write_bytes(b"".join(lines))
    record = read_record(path)
    assert [each.kind for each in record.entries] == ["unknown"] * 4
    assert record.values["abs_max"].tolist() == [[0.0] * 4, [1.0] * 4]
    assert len(list(record)) == 8


def test_a_forked_process_does_not_own_the_file(tmp_path):
    file = record_file(tmp_path / "run.ofr")
    pid = os.fork()
    if pid == 0:
        os._exit(int(file.is_own))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert file.is_own
    file.close()


# When there is no room.


def test_a_full_disk_costs_steps_and_nothing_else(tmp_path):
    path = tmp_path / "run.ofr"
    file = record_file(path)
    append_step(file, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file._end + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="no room"):
            append_step(file, 1)
        assert path.stat().st_size == file._end + 50
        with pytest.raises(OSError, match="no room"):
            append_step(file, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_step(file, 3)
    file.close()
    record = read_record(path)
    assert numbers_of(record) == [0, 3]
    assert not record.is_truncated and not record.num_damaged


def test_a_file_that_cannot_be_thinned_stops_at_its_size(tmp_path, as_kept):
    (tmp_path / "to").mkdir()
    file = record_file(tmp_path / "run.ofr")
    append_step(file, 0)
    os.rename(tmp_path / "run.ofr", tmp_path / "to" / "run.ofr")
    (tmp_path / "run.ofr").write_text("the user's")

    def fill():
        for number in range(1, 500):
            append_step(file, number)
            if file._thread is not None:
                file._thread.join()

    as_kept.error(OSError, fill)
    file.close()
    assert (tmp_path / "run.ofr").read_text() == "the user's"
    assert (tmp_path / "to" / "run.ofr").stat().st_size <= SMALL
    assert len(list(tmp_path.iterdir())) == 2


# What is there already.


def test_no_file_is_written_over(tmp_path):
    path = tmp_path / "run.ofr"
    path.write_text("the user's")
    paths = [write(path, 1).path for _ in range(2)]
    assert [each.name for each in paths] == ["run.2.ofr", "run.3.ofr"]
    assert path.read_text() == "the user's"


# Old steps are thinned.


def test_a_long_run_fits_its_file_and_keeps_all_extremes(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 2000, max_bytes=4 * SMALL)
    assert path.stat().st_size <= 4 * SMALL
    assert list(tmp_path.iterdir()) == [path]
    record = read_record(path)
    assert numbers_of(record) == list(range(2000))
    assert all(step.count == 1 for step in record.steps[-20:])
    assert {step.count for step in record.steps} == {1, 16, 256}
    first = [step.first for step in record.steps]
    last = [step.last for step in record.steps]
    assert record.values["abs_min"][:, 1].tolist() == first
    assert record.values["abs_max"][:, 1].tolist() == last
    assert record.steps[0].seconds == 0.5 * record.steps[0].count


def test_steps_that_come_while_a_file_is_thinned_are_kept(tmp_path, monkeypatch):
    reached, may_go_on = threading.Event(), threading.Event()

    def slow_fold(lines, level):
        reached.set()
        may_go_on.wait(60)
        return fold(lines, level)

    monkeypatch.setattr("overflow_fast.guard.record.thinning.fold", slow_fold)
    file, number = record_file(tmp_path / "run.ofr"), 0
    while file._thread is None:
        append_step(file, number)
        number += 1
    thread = file._thread
    assert reached.wait(60)
    for _ in range(10):
        append_step(file, number)
        number += 1
    may_go_on.set()
    thread.join()
    append_step(file, number)
    file.close()
    assert numbers_of(read_record(file.path)) == list(range(number + 1))
    assert len(read_record(file.path)) < number


def test_lines_larger_than_the_file_do_not_have_it_thinned_for_ever(tmp_path):
    file = write(tmp_path / "run.ofr", 40, max_bytes=500)
    record = read_record(file.path)
    assert numbers_of(record) == list(range(40))
    assert len(record) < 20


def columns_of(line):
    (columns,) = line.models
    numbers = {name: read_numbers(columns, name, "little") for name in COLUMNS}
    return {name: each.tolist() for name, each in numbers.items() if each is not None}


def test_folded_columns_are_extremes_over_the_steps():
    nans, infs = packed("q", [0, 0, 7, 0]), packed("q", [0, 0, 0, 2])
    lines = [
        step_line(0, [1, NAN, NAN, 5], [2, NAN, NAN, 6], num_nan=nans),
        step_line(1, [0, 3, NAN, INF], [9, 4, NAN, INF], num_inf=infs),
    ]
    lines[1].actions, lines[1].num_skipped = {"skip": 1}, 1
    folded = fold(lines, 1)
    assert repr(columns_of(folded)) == repr(
        {
            "abs_min": [0.0, 3.0, NAN, 5.0],
            "abs_max": [9.0, 4.0, NAN, INF],
            "num_nan": [0, 0, 7, 0],
            "num_inf": [0, 0, 0, 2],
        }
    )
    assert (folded.first, folded.last, folded.count) == (0, 1, 2)
    assert (folded.actions, folded.num_skipped) == ({"skip": 1}, 1)


def test_an_entry_that_came_later_has_no_number_before():
    narrow = step_line(0)
    narrow.models[0] = Columns(num=2, abs_min=array("f", [8, 8]).tobytes())
    columns = columns_of(fold([narrow, step_line(1)], 1))
    assert columns["abs_min"] == columns["abs_max"] == [1, 1, 1, 1]


def test_numbers_beyond_float32_keep_all_their_bits():
    exact = [1e300, 1 / 3, 0.0, 2.0**-1070]
    lines = [step_line(0, abs_max=packed("d", exact))] * 2
    assert columns_of(fold(lines, 1))["abs_max"] == exact


def test_a_file_of_another_byte_order_reads_the_same(tmp_path):
    path = tmp_path / "run.ofr"
    line = step_line(0, abs_max="PoAAAD6AAAA+gAAAPoAAAA==")  # 0.25, four times
    path.write_bytes(head_lines(byteorder="big") + line_bytes(line))
    assert read_record(path).values["abs_max"].tolist() == [[0.25] * 4]


# Files that are something else.


def test_an_empty_file_is_a_record_of_no_steps(tmp_path):
    path = tmp_path / "run.ofr"
    path.touch()
    record = read_record(path)
    assert (record.steps, record.entries, record.run) == ([], [], {})
    assert record.values["abs_max"].shape == (0, 0)
    assert list(record) == []


@pytest.mark.parametrize(
    "text", [b"hello", b"hello\n", b"{}\n", b"\x80\x04K.\n", b"[]\n"]
)
def test_another_file_is_named_as_such(tmp_path, text, as_kept):
    path = tmp_path / "run.ofr"
    path.write_bytes(text)
    as_kept.error(RecordError, read_record, path)


def test_a_newer_schema_says_what_to_do(tmp_path):
    path = tmp_path / "run.ofr"
    path.write_bytes(head_lines(schema=2, overflow_fast="9.0"))
    said = r"has schema 2, written by overflow_fast 9\.0; .* up to 1: run"
    with pytest.raises(RecordError, match=said):
        read_record(path)


def test_lines_of_an_unknown_kind_are_passed_over(tmp_path):
    path = tmp_path / "run.ofr"
    write(path, 1)
    with path.open("ab") as file:
        file.write(b'{"kind": "mark", "step": 0}\n')
    assert numbers_of(read_record(path)) == [0]
