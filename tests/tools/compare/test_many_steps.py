"""Runs of many steps: one step in memory, a bounded list of rows, the same answer."""

import json
import tracemalloc

import pytest
import torch

import overflow_fast
from overflow_fast import RecordingError
from overflow_fast.tools.compare import compare_runs, comparison, recordings


def one(step):
    return 1.0


def record(
    folder, num=6, rate=lambda _: 0.01, dtype=torch.float32, scale=one, **options
):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)]
    model = torch.nn.Sequential(*layers).to(dtype)
    with overflow_fast.recording(folder, model, **options) as run:
        for step in range(num):
            if step:
                run.step()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            (model(x.to(dtype)).square().sum() * scale(step)).backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= rate(step) * each.grad
    return folder


def lines_of(folder):
    text = (folder / "rank-0.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def write(folder, lines, **options):
    text = "".join(f"{json.dumps(line, **options)}\n" for line in lines)
    (folder / "rank-0.jsonl").write_text(text)


PAIRS = {
    "equal": {},
    "an update in the middle": {"rate": lambda step: 0.01 * (1 + (step == 2))},
    "an update at the beginning": {"rate": lambda step: 0.02},
    "rounding": {"dtype": torch.bfloat16, "rate": lambda step: 0.0},
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("options", [{}, {"threshold": 0.0}, {"cosine": 1.0}])
def test_a_bounded_list_of_rows_changes_no_sentence(
    pair, options, tmp_path, monkeypatch
):
    rate = PAIRS[pair].get("rate") if pair == "rounding" else None
    record(tmp_path / "b", **({"rate": rate} if rate else {}))
    run, reference = record(tmp_path / "a", **PAIRS[pair]), tmp_path / "b"
    whole = overflow_fast.compare(run, reference, **options)
    assert whole.to_dict()["num_unlisted"] == 0
    monkeypatch.setattr(comparison, "MAX_ROWS", 30)
    found = overflow_fast.compare(run, reference, **options)
    assert len(found.rows) <= 60 < len(whole.rows) == found.num_pairs
    assert str(found) == str(whole)
    assert found.counts() == whole.counts() and found.differs == whole.differs
    assert found.num_compared == whole.num_compared
    assert found.num_computed == whole.num_computed
    plain = found.to_dict()
    assert plain["num_unlisted"] == len(whole.rows) - len(found.rows)
    where = [(row.step, row.order) for row in found.rows]
    assert where == sorted(where)
    if found.first is not None:
        step = found.first.row.step
        own = [row.order for row in whole.rows if row.step == step]
        assert own == [row.order for row in found.rows if row.step == step]
    page = found.to_html(tmp_path / "diff.html").read_text()
    num_equal = whole.counts()["equal"]
    listed = sum(row.verdict != "equal" for row in found.rows)
    more = len(whole.rows) - num_equal - listed
    caption = f"{listed} rows that are not equal"
    caption += f"; {more} more are not listed" * bool(more)
    assert f"{caption}; {num_equal} are equal" in page


def test_rounding_in_the_steps_before_is_not_called_no_difference(tmp_path, as_kept):
    record(tmp_path / "b", 3, lambda step: 0.0)
    for name, dtype in (("half", torch.bfloat16), ("float", torch.float32)):
        scale = lambda step: 3.0 if step == 2 else 1.0  # noqa: E731
        record(tmp_path / name, 3, lambda step: 0.0, dtype, scale)
    half, other = (
        str(overflow_fast.compare(tmp_path / name, tmp_path / "b").first)
        for name in ("half", "float")
    )
    as_kept(half)
    as_kept(other)


def test_steps_of_which_nothing_was_compared_are_not_called_equal(tmp_path):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3, scale=abs)
    head, *lines = lines_of(run)
    for line in lines:
        if line["step"] == 0 and line["kind"] == "row":
            line.pop("fingerprint", None), line.update(why="lost"), line.pop("same", 0)
    write(run, [head, *lines])
    found = overflow_fast.compare(run, reference).first
    assert found.row.step == 1 and found.earlier == ()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "MAX_ROWS", 50)
    peaks = []
    for num in (2, 4, 60):  # the first imports
        folders = [
            record(tmp_path / f"{name}{num}", num, lambda step, r=rate: r)
            for name, rate in (("a", 0.01), ("b", 0.02))
        ]
        tracemalloc.start()
        assert overflow_fast.compare(*folders).first.kind == "update"
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[1], peaks


def test_a_step_is_decoded_once_and_equal_rows_for_one_run_alone(tmp_path, monkeypatch):
    record(tmp_path / "a"), record(tmp_path / "b")
    decoded, own = [], recordings._rows_of
    monkeypatch.setattr(
        recordings, "_rows_of", lambda *a: decoded.append(a[1]) or own(*a)
    )
    assert overflow_fast.compare(tmp_path / "a", tmp_path / "b").first is None
    assert decoded == list(range(6))


def test_tensors_of_equal_rows_are_read_from_their_own_folder(tmp_path):
    run, reference = (record(tmp_path / n, 1, tensors=True) for n in "ab")
    for path in reference.glob("*.safetensors"):
        path.unlink()
    swapped = {r"^0$": "x", r"^2$": "0", r"^x$": "2"}
    found = overflow_fast.compare(run, reference, names=swapped)
    assert found.first.kind == "weights" and not found.first.row.measures.is_exact
    assert any(f"{reference}/rank-0.step-0.0.safetensors" in s for s in found.said)


@pytest.mark.parametrize("options", [{"separators": (",", ":")}, {"sort_keys": True}])
def test_the_order_and_the_spaces_of_a_line_are_the_writers_choice(
    options, tmp_path, as_kept
):
    run, reference = record(tmp_path / "a"), record(tmp_path / "b")
    write(run, lines_of(run), **options)
    found = overflow_fast.compare(run, reference)
    assert found.said == []
    as_kept(found.said, found.verdict())


def test_rows_of_several_steps_may_be_mixed(tmp_path):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3)
    head, *lines = lines_of(run)
    ends = [line for line in lines if line["kind"] == "step"]
    rows = sorted((x for x in lines if x["kind"] == "row"), key=lambda x: x["order"])
    write(run, [head, *rows, *reversed(ends)])
    found = overflow_fast.compare(run, reference)
    assert found.counts()["equal"] == found.num_pairs > 60 and found.said == []


DAMAGE = {
    "cut": lambda line: line[: len(line) // 2],
    "another step's": lambda line: line[:-1] + ', "step": 77}',
    "a step's end": lambda line: line[:-1] + ', "kind": "step"}',
    "no JSON at all": lambda line: "\0" * 10,
    "empty": lambda line: "",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_row_is_counted_once_and_the_others_are_compared(
    how, tmp_path, as_kept
):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3)
    path = run / "rank-0.jsonl"
    lines = path.read_text().splitlines()
    num = 20  # within step 0
    lines[num] = DAMAGE[how](lines[num])
    path.write_text("\n".join(lines) + "\n")
    for folders in ((run, reference), (reference, run)):
        found = overflow_fast.compare(*folders)
        (said,) = [each for each in found.said if "damaged" in each]
        as_kept(said)
        assert found.num_alone == 1
        assert found.counts()["equal"] == found.num_pairs > 60


def test_a_step_that_breaks_off_is_left_out(tmp_path, as_kept):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3)
    head, *lines = lines_of(run)
    write(run, [head, *lines[:-1]])
    found = overflow_fast.compare(run, reference)
    assert {row.step for row in found.rows} == {0, 1}
    as_kept(found.said)


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path, as_kept):
    run = record(tmp_path / "a", 2)
    (step,) = recordings.read_run(run).steps[1]
    (run / "rank-0.jsonl").write_text("{}\n")
    as_kept.error(RecordingError, step.read)
    (run / "rank-0.jsonl").unlink()
    as_kept.error(RecordingError, step.read)


def test_settings_are_those_of_the_step_whatever_is_read_first(tmp_path):
    run = record(tmp_path / "a", 1)
    head, *_, end = lines_of(run)
    ends = [{**end, "step": i} for i in range(4)]
    for i, line in enumerate(ends):
        line["settings"] = {"": {"p": str(i)}} if i in (0, 2) else {}
    write(run, [head, *ends])
    steps = recordings.read_run(run).steps
    for number, p in ((3, "2"), (1, "0"), (2, "2"), (0, "0")):
        assert steps[number][0].read().modes["settings"][""] == {"p": p}


def test_a_file_beyond_any_recording_is_refused(tmp_path, monkeypatch, as_kept):
    run = record(tmp_path / "a", 1)
    monkeypatch.setattr(recordings, "_MOST", 100)
    as_kept.error(RecordingError, overflow_fast.compare, run, run)


def test_progress_is_shown_of_reading_and_of_comparing(tmp_path, monkeypatch):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 2)
    shown = []

    def with_progress(items, unit, total):
        found = list(items)
        shown.append((unit, total, len(found)))
        return found

    for module in (recordings, compare_runs):
        monkeypatch.setattr(module, "with_progress", with_progress)
    overflow_fast.compare(run, reference)
    found = "steps found"
    assert shown == [(found, None, 3), (found, None, 2), ("steps", 2, 2)]
