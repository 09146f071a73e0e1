"""Whatever is at the path of a log, a record or evidence: a warning, the run goes on.

Nothing hangs either: each case runs in a process that has to end.
"""

import os

import pytest
import torch
from processes import python
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.guard.options import Log, Record

PROGRAM = """
import logging, os, resource, sys, torch, overflow_fast
limit, fine, *paths = sys.argv[1:]
paths = [path.encode().decode("unicode_escape") for path in paths]
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("overflow_fast").addHandler(handler)
words = "are lost", "was kept", "is there already", "cannot be written"

def run(kind, path):
    lines.clear()
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with overflow_fast.OverflowGuard(
        model, optimizer, "skip", explain=False, **{kind: path}
    ) as guard:
        for i in range(6):
            value = float("nan") if i % 2 else 1.0
            model(torch.full((2, 6), value)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.num_skipped == 3 and not torch.equal(model.weight, before)
    assert guard.coverage().failures == 0
    return [sum(word in line for line in lines) for word in words]

if limit == "nobody":
    for kind in ("log", "record", "evidence"):
        run(kind, fine + kind)  # imports what that user may not
    os.setgid(65534), os.setuid(65534)
elif limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
for path in paths:
    for kind in ("log", "record", "evidence"):
        print(run(kind, path))
"""
LOST, KEPT, BESIDE = "[1, 0, 0, 0]", "[0, 1, 0, 0]", "[0, 0, 1, 0]"
FINE = "[0, 0, 0, 0]"
# When the guard is made, and once something is lost.
BOTH, BOTH_KEPT = "[1, 0, 0, 1]", "[0, 1, 0, 1]"


def guarded(limit, *paths):
    """What was logged for each path as log, record and evidence."""
    fine = f"{paths[0]}-fine-"
    done = python("-c", PROGRAM, limit, fine, *map(str, paths))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_path_that_cannot_be_written_is_one_warning(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    told, impossible = ("n" * 300, "file/below"), ("a\\x00b", "a\\ud800b")
    paths = [f"{tmp_path}/{name}" for name in ("fifo", "folder", *told, *impossible)]
    assert guarded("", *paths) == [
        *(LOST, BESIDE, BOTH_KEPT),  # a FIFO: a record lies beside it
        *(BOTH, BESIDE, FINE),
        *(BOTH, BOTH, BOTH_KEPT) * len(told),
        *(LOST, LOST, KEPT) * len(impossible),
    ]


def test_a_full_disk_is_one_warning(tmp_path):
    kinds = '("log", "record", "evidence")'
    for kind, said in (("log", LOST), ("record", LOST), ("evidence", KEPT)):
        program = PROGRAM.replace(
            f"{kinds}:\n        print", f"[{kind!r}]:\n        print"
        )
        done = python("-c", program, "100", "", str(tmp_path / kind))
        assert done.stdout == f"{said}\n", done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_without_permission_is_one_warning(tmp_path):
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o055)
    (tmp_path / "closed").mkdir(mode=0o700)
    assert guarded("nobody", tmp_path / "closed" / "x") == [BOTH, BOTH, BOTH_KEPT]


def test_a_slow_reader_of_a_fifo_costs_lines_and_no_time(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    program = PROGRAM.replace("range(6)", "range(400)").replace("== 3", "== 200")
    program = program.replace('("log", "record", "evidence")', '("log",)')
    done = python("-c", program, "", "", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{LOST}\n"
    begin = os.read(reader, 2**16)
    assert begin.startswith(b'{"kind": "run", "schema": 1')
    os.close(reader)


def test_names_that_come_anew_do_not_make_a_record_grow(tmp_path):
    program = """
import logging, os, sys, torch, overflow_fast
logging.getLogger("overflow_fast").setLevel(logging.ERROR)
path = sys.argv[1]
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
most, bound = 0, 2**18
with overflow_fast.OverflowGuard(
    model, optimizer, monitors=[], record=overflow_fast.options.Record(path, mib=0.25)
) as guard:
    for i in range(1500):
        model(torch.randn(4, 6)).mean().backward()
        guard.record(**{f"{'long' * (i % 40)}{i}": torch.ones(())})
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, os.path.getsize(path))
record = overflow_fast.read_record(path)
assert [n for s in record.steps for n in range(s.first, s.last + 1)] == [*range(1500)]
assert 10 < len(record.entries) <= 512, len(record.entries)
assert not record.num_damaged
print(most <= bound + 2**15, most)
"""
    done = python("-c", program, str(tmp_path / "run.ofr"))
    assert done.stdout.startswith("True"), done.stdout + done.stderr


def test_a_class_of_a_very_long_name_does_not_make_files_grow(
    tmp_path, caplog, as_kept
):
    kind = type("A" * 2**21, (nn.Sequential,), {})
    model = kind(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    record, log = tmp_path / "run.ofr", tmp_path / "log.jsonl"
    options = {"record": Record(record, mib=0.25), "log": Log(log, mib=0.01, keep=2)}
    with OverflowGuard(model, optimizer, **options):
        for _ in range(60):
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    assert record.stat().st_size <= 2**18
    assert all(each.stat().st_size <= 2**14 for each in tmp_path.glob("log*"))
    as_kept(caplog.messages)
