"""The pages for newcomers: programs print what is shown; cured, they are finite."""

import re

import pytest
import torch
from guarding import batches
from pages import (
    ROOT,
    Examples,
    Programs,
    fences,
    output_of,
    pages,
    run,
    without_numbers,
)
from small_models import sgd
from torch import nn

import overflow_fast

NAN = "docs/my-run-is-nan.md"
START = "docs/getting-started.md"
READING = "docs/reading-a-report.md"
HOW = "docs/how-it-works.md"
PROGRAMS = {
    (page, place): program
    for page in (NAN, START, READING, HOW)
    for place, program in Programs(page).items()
}
of_nan, of_start, of_reading = map(Examples, (NAN, START, READING))


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


of_the_pages_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="the pages show torch 2.13's numbers",
)


@of_the_pages_torch
@pytest.mark.parametrize("place", PROGRAMS, ids="#".join)
def test_a_program_prints_what_is_shown(place, tmp_path):
    program = PROGRAMS[place]
    found = output_of(program.code, tmp_path)
    for part in program.shown.split("[...]"):
        assert without_numbers(part) in without_numbers(found), found


CURED = [place for place in PROGRAMS if place[0] == NAN]


@pytest.mark.parametrize("place", CURED, ids="#".join)
def test_a_cured_program_is_finite(place, tmp_path):
    program = PROGRAMS[place]
    assert len(program.cures) == 1
    for cure in program.cures:
        assert output_of(cure, tmp_path) == ""


@of_nan("first-find-the-place")
def test_the_loop(code):
    _has_a_loop(code)


@of_start("put-it-into-your-loop")
def test_the_loop_again(code):
    _has_a_loop(code)


def _has_a_loop(code):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    names = {"model": model, "optimizer": sgd(model), "criterion": nn.MSELoss()}
    (x, y), *_ = batches(1)
    with pytest.raises(overflow_fast.NonFiniteError, match="Bad data"):
        run(code, **names, loader=[(x, y), (x, y * torch.nan)])


@of_start("decide-what-a-bad-step-does")
def test_a_run_without_someone_at_the_keyboard(code, tmp_path):
    pytest.importorskip("safetensors")
    model = nn.Linear(8, 1)
    optimizer = sgd(model)
    guard = run(code, model=model, optimizer=optimizer)["guard"]
    before = model.weight.clone()
    model(torch.full((2, 8), torch.nan)).sum().backward()
    optimizer.step()
    assert guard.last_step_skipped and torch.equal(model.weight, before)
    assert (tmp_path / "guard.jsonl").exists() and (tmp_path / "evidence").is_dir()


@of_the_pages_torch
@of_reading("in-a-program")
def test_reading_in_a_program(code, tmp_path, capsys, as_kept):
    program = PROGRAMS[READING, "a-report"].code
    (tmp_path / "train.py").write_text(program)
    compiled = compile(program, tmp_path / "train.py", "exec")
    run(code, train=lambda: exec(compiled, {}))
    out = capsys.readouterr().out
    as_kept(out)


@of_the_pages_torch
def test_a_whole_report_is_as_it_is_shown(tmp_path):
    program = PROGRAMS[READING, "a-report"].code
    program += "    print(guard.last_report or '')\n"
    step = "    optimizer.step()\n"
    caught = f"    try:\n    {step}    except FloatingPointError:\n        pass\n"
    found = output_of(program.replace(step, caught), tmp_path)
    (shown,) = (each for _, each in fences(pages()[READING]) if each[:8] == "Detected")
    first = shown.partition("[...]")[0]
    assert without_numbers(first) in without_numbers(found), found


def test_every_python_block_of_these_pages_is_run():
    shown = {place for _, place in PROGRAMS}
    untested = of_nan.untested | of_start.untested | of_reading.untested
    assert untested | Examples(HOW).untested == shown


def test_the_table_of_dtypes():
    rows = r"^\| (\w*float\w*) \| (\S+) \| (\S+) \| (\S+) \|"
    found = re.findall(rows, pages()[NAN], re.M)
    assert len(found) == 3
    for name, *numbers in found:
        info = torch.finfo(getattr(torch, name))
        for shown, true in zip(numbers, (info.max, info.tiny, info.eps), strict=True):
            assert float(shown) == pytest.approx(true, rel=0.02)


@pytest.mark.parametrize("language", ["zh", "ko"])
def test_translations_have_the_same_code_and_sections(language):
    text = (ROOT / "docs" / language / "my-run-is-nan.md").read_text()
    assert fences(text) == fences(pages()[NAN])
    headings = [len(re.findall(r"^## ", t, re.M)) for t in (text, pages()[NAN])]
    assert headings[0] == headings[1]
