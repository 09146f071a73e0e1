"""Runs of many steps: one step in memory, and the rows of the one that differs."""

import json
import tracemalloc

import pytest
import torch

import overflow_fast
from overflow_fast import RecordingError
from overflow_fast.tools.compare import compare_runs, recorded


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


def file_of(folder, step):
    return folder / f"rank-0.step-{step}.jsonl"


def rewrite(folder, step, change=lambda row: None, **options):
    """Writes a step's file anew, each row changed."""
    path = file_of(folder, step)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for row in lines[1:]:
        change(row)
    path.write_text("".join(f"{json.dumps(line, **options)}\n" for line in lines))


def test_the_comparison_ends_with_the_first_step_that_differs(tmp_path, as_kept):
    run = record(tmp_path / "a", rate=lambda step: 0.01 * (1 + (step == 2)))
    found = overflow_fast.compare(run, record(tmp_path / "b"))
    assert (found.first.kind, found.first.row.step) == ("update", 3), found
    assert found.steps == [0, 1, 2, 3] and {row.step for row in found.rows} == {3}
    assert found.num_pairs == 4 * len(found.rows) and found.num_compared > 60
    as_kept(found.said)


def test_the_step_of_the_largest_difference_is_shown_where_none_is_named(tmp_path):
    rate = lambda _: 0.0  # noqa: E731
    run = record(tmp_path / "a", dtype=torch.bfloat16, rate=rate)
    reference = record(tmp_path / "b", rate=rate)
    found = overflow_fast.compare(run, reference)
    assert found.first is None and found.steps == list(range(6))
    (step,) = {row.step for row in found.rows}
    largest = max(row.times or 0 for row in found.rows)
    assert largest < 8 and f"Step {step}:" in str(found)
    assert sum(found.counts().values()) == found.num_pairs == 6 * len(found.rows)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(tmp_path):
    peaks = []
    for num in (2, 4, 60):  # the first imports
        folders = [
            record(tmp_path / f"{name}{num}", num, lambda step, r=rate: r)
            for name, rate in (("a", 0.0), ("b", 0.0))
        ]
        tracemalloc.start()
        assert len(overflow_fast.compare(*folders).steps) == num
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[1], peaks


@pytest.mark.parametrize("options", [{"separators": (",", ":")}, {"sort_keys": True}])
def test_the_order_and_the_spaces_of_a_line_are_the_writers_choice(
    options, tmp_path, as_kept
):
    run, reference = record(tmp_path / "a"), record(tmp_path / "b")
    for step in range(6):
        rewrite(run, step, **options)
    found = overflow_fast.compare(run, reference)
    assert found.said == []
    as_kept(found.said, found.verdict())


DAMAGE = {
    "cut": lambda line: line[: len(line) // 2],
    "another shape": lambda line: line.replace('"shape": [', '"shape": ["x", '),
    "another line's": lambda line: '{"kind": "step"}',
    "no JSON at all": lambda line: "\0" * 10,
    "nothing": lambda line: "",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_left_out_and_the_others_are_compared(how, tmp_path, as_kept):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3)
    path = file_of(run, 1)
    lines = path.read_text().splitlines()
    lines[20] = DAMAGE[how](lines[20])
    path.write_text("\n".join(lines) + "\n")
    for folders in ((run, reference), (reference, run)):
        found = overflow_fast.compare(*folders)
        assert found.steps == [0, 2] and found.num_alone == 0
        assert found.counts()["equal"] == found.num_pairs > 40
        (said,) = found.said
        as_kept(said)


def test_a_step_that_breaks_off_is_left_out(tmp_path, as_kept):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 3)
    lines = file_of(run, 2).read_text().splitlines(keepends=True)
    file_of(run, 2).write_text("".join(lines[:-1]))
    found = overflow_fast.compare(run, reference)
    assert found.steps == [0, 1]
    as_kept(found.said)


def test_a_run_of_which_nothing_can_be_read_is_an_error(tmp_path, as_kept):
    run = record(tmp_path / "a", 1)
    file_of(run, 0).write_text("")
    as_kept.error(RecordingError, overflow_fast.compare, run, run)


def test_a_file_beyond_any_recording_is_refused(tmp_path, monkeypatch, as_kept):
    run = record(tmp_path / "a", 1)
    monkeypatch.setattr(recorded, "_MOST", 100)
    as_kept.error(RecordingError, overflow_fast.compare, run, run)


def test_progress_is_shown(tmp_path, monkeypatch):
    run, reference = record(tmp_path / "a", 3), record(tmp_path / "b", 2)
    shown = []

    def with_progress(items, unit, total):
        shown.append((unit, total))
        return items

    monkeypatch.setattr(compare_runs, "with_progress", with_progress)
    overflow_fast.compare(run, reference)
    assert shown == [("steps", 2)]
