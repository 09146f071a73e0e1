"""Incidents across restarts: who produces them, which are told, how a run ends."""

import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import INF, batches, make, plant, train_step
from ranks import all_of

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.__main__ import main
from overflow_fast.guard.ranks.rank_info import RankInfo
from overflow_fast.guard.report.exit_code import exit_code_of
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.findings import NOT_REPLAYED
from overflow_fast.guard.report.log_lines import StepLine
from overflow_fast.guard.report.op import Op
from overflow_fast.options import Log, Record
from overflow_fast.tools.cli.logged_incidents import read_incidents
from overflow_fast.tools.cli.suspects_command import suspects_of

pytestmark = [pytest.mark.explains, pytest.mark.xdist_group("processes")]


def incident(step, device="cuda:1", host="n1", first="head: output", cause="", run="a"):
    where = {"first": first, "host": host, "device": device, "cause": cause}
    return StepLine(run=run, time=1e9 + step, step=step, is_clean=False, **where)


def rows_of(*incidents):
    return [
        (r.host, r.device, r.incidents, r.transient, r.elsewhere, r.steps)
        for r in suspects_of(incidents).rows
    ]


def test_an_incident_counts_once_however_often_it_is_logged():
    twice = [incident(5, run=run) for run in "abc"]
    assert rows_of(*twice, incident(7)) == [("n1", "cuda:1", 2, 0, 0, [5, 7])]
    assert suspects_of(twice).runs == 3


def test_devices_with_transients_come_first():
    gone = "not reproducible"
    found = rows_of(
        *(incident(step, host="n2") for step in range(4)),
        *(incident(step, cause=gone) for step in (10, 20)),
        incident(30, device="cuda:2", cause=gone),
    )
    assert [each[:4] for each in found] == [
        ("n1", "cuda:1", 2, 2),
        ("n1", "cuda:2", 1, 1),
        ("n2", "cuda:1", 4, 0),
    ]


def test_what_another_device_has_in_the_same_step_is_no_sign_of_either():
    gone = "not reproducible"
    found = rows_of(incident(5, cause=gone), incident(5, host="n2", cause=gone))
    assert [each[2:5] for each in found] == [(1, 0, 1), (1, 0, 1)]


def test_the_table_is_read_by_people_and_programs(as_kept):
    found = suspects_of([incident(5, cause="not reproducible")])
    head, row = str(found).splitlines()
    assert head.split() == [
        "host",
        "device",
        "incidents",
        "transient",
        "elsewhere",
        "last",
    ]
    assert row.split()[:5] == ["n1", "cuda:1", "1", "1", "0"]
    as_kept(row)
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["steps"] == [5]
    as_kept(suspects_of([]))


def test_a_place_is_read_as_it_is_written():
    place = RankInfo(3, 8, "node, with (odd) name", "cuda:2")
    assert RankInfo.of(str(place)) == place
    assert RankInfo.of(None) is RankInfo.of("somewhere") is None


# Runs that begin again from a checkpoint.


def a_run(path, bad_step=None, first=0, **options):
    """Trains three steps from one on; returns the guard, and the error if one came."""
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, log=path, **options)
    guard.step = first
    error = None
    try:
        for step, batch in enumerate(batches(3), first):
            is_bad = step == bad_step
            with plant(model.head, INF) if is_bad else torch.enable_grad():
                train_step(model, optimizer, batch)
    except NonFiniteError as caught:
        error = caught
    guard.remove()
    return guard, error


def test_an_incident_that_runs_come_to_again_counts_once(tmp_path):
    path = tmp_path / "guard.jsonl"
    for first in (10, 11):
        a_run(path, bad_step=11, first=first, on_overflow="skip", explain=False)
    (row,) = suspects_of(read_incidents(path)).rows
    assert (row.incidents, row.steps, row.device) == (1, [11], "cpu")
    a_run(path, bad_step=12, first=11, on_overflow="skip", explain=False)
    found = suspects_of(read_incidents(path))
    assert found.rows[0].steps == [11, 12] and found.runs == 3


def test_what_a_replay_gives_again_is_deterministic(model, optimizer, tmp_path):
    OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        model.blocks[0].factor = math.inf
        train_step(model, optimizer, batches(1)[0])
    assert caught.value.report.explanation.op is not None
    assert caught.value.exit_code == 16


def test_a_fault_that_no_replay_gives_is_transient(model, optimizer):
    OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        with plant(model.blocks[1].fc1, INF):
            loss = model(*batches(1)[0])["loss"]
        loss.backward()
        optimizer.step()
    assert caught.value.report.explanation.cause == "not reproducible"
    assert caught.value.exit_code == 17


def test_a_gradient_changed_after_its_backward_is_no_fault_of_a_device():
    model, optimizer = make()
    OverflowGuard(model, optimizer)
    model(*batches(1)[0])["loss"].backward()
    model.blocks[1].fc1.weight.grad[0, 0] = INF
    with pytest.raises(NonFiniteError) as caught:
        optimizer.step()
    found = caught.value.report.explanation
    assert found.is_behind_backward and "grad[0, 0] = INF" in found.op.code
    assert caught.value.exit_code == 16


def test_exit_codes():
    op = Op("aten.exp")
    assert exit_code_of(Explanation("forward", "range overflow", op=op)) == 16
    assert exit_code_of(Explanation("data", "bad data")) == 16
    assert exit_code_of(Explanation("forward", "not reproducible")) == 17
    partly = Explanation("backward", "not reproducible", notes=[NOT_REPLAYED])
    assert exit_code_of(partly) == 1  # clipping of one's own may have made it
    assert exit_code_of(Explanation(notes=["not replayed"])) == 1
    assert exit_code_of(None) == 1


# What is there to be read.


def test_logs_of_ranks_and_older_ones_are_read_and_nothing_else(tmp_path):
    def write(name, *lines):
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tmp_path / name).write_text(text)

    def bad(step, **more):
        return {"kind": "step", "run": "a", "step": step, "is_clean": False, **more}

    header = {"kind": "run", "run": "a", "host": "n9", "overflow_fast": "0.1.0"}
    write("guard.jsonl", header, bad(1, first="x", time=5.0))
    write("guard.rank12.jsonl", header, bad(2, first="x", host="n3", device="cuda:0"))
    write("guard.jsonl.1", header, bad(3, first="x"), bad(4))
    write("guard.other.jsonl", header, bad(5, first="x"))
    with open(tmp_path / "guard.jsonl", "a") as file:
        file.write('{"kind": "step", "is_clean": false, "fir')
    found = {each.step: each.host for each in read_incidents(tmp_path / "guard.jsonl")}
    assert found == {1: "n9", 2: "n3", 3: "n9"}
    assert read_incidents(tmp_path / "none" / "guard.jsonl") == []


def test_the_command_counts_what_stands_in_the_log(tmp_path, capsys):
    path = tmp_path / "guard.jsonl"
    assert main(["suspects", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    a_run(path, bad_step=11, first=10, on_overflow="skip", explain=False)
    assert main(["suspects", str(path)]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[1:7] == ["cpu", "1", "0", "0", "step", "11,"]
    assert main(["suspects", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["steps"] == [11]


def test_a_file_that_is_no_log_has_no_incidents_to_count(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    assert main(["suspects", str(path)]) == 2
    assert f"{path} is no log of overflow_fast" in capsys.readouterr().err
    path.write_text("")
    assert main(["suspects", str(path)]) == 0


def collected(folder, collect):
    """What each rank has after a bad step of rank 1, and the files of all."""
    own = folder / collect
    model, optimizer = make()
    guard = OverflowGuard(
        *(model, optimizer, "skip"),
        process_group=dist.group.WORLD,
        explain=False,
        log=Log(own / "guard.jsonl", ranks=collect),
        record=Record(own / "run.ofr", ranks=collect),
        evidence=own / "evidence",
    )
    with plant(model.head, INF) if dist.get_rank() == 1 else torch.enable_grad():
        train_step(model, optimizer, batches(1)[0])
    guard.remove()
    dist.barrier()
    (row,) = suspects_of(read_incidents(own / "guard.jsonl")).rows
    runs = [run.name for run in (own / "evidence" / "overflow_fast").iterdir()]
    names = sorted(path.name for path in own.iterdir())
    return row.incidents, row.device, guard.last_report.where, names, runs


def all_collected():
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        names = [name]
        dist.broadcast_object_list(names)
        patch.setenv("LOCAL_RANK", str(dist.get_rank() % 2))
        found = {
            collect: collected(Path(names[0]), collect)
            for collect in ("all", "node", "rank0")
        }
        dist.barrier()
        return found


SCENARIOS = {"collected": all_collected}


@pytest.mark.slow
def test_few_ranks_write_and_all_know(as_kept):
    writers = {"all": (0, 1, 2, 3), "node": (0, 2), "rank0": (0,)}
    for of_rank in all_of("test_suspects", "collected"):
        for collect, ranks in writers.items():
            incidents, device, where, names, runs = of_rank[collect]
            assert incidents == 1 and device.startswith(("cpu", "cuda"))
            as_kept(where)
            logs = [f"guard.rank{rank}.jsonl" for rank in ranks]
            records = [f"run.rank{rank}.ofr" for rank in ranks]
            assert names == ["evidence", *logs, *records]
            (run,) = runs
            assert "-rank1-" in run  # of the rank that found it alone
