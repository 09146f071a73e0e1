"""The command line's page, and the files that a page is read from."""

import contextlib
import json
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from evidence_folders import bad_steps
from flight_records import head_lines, step_line
from guarding import NAN, batches, make, plant, train, train_step
from page_records import Parsed

from overflow_fast import NonFiniteError, OverflowGuard, read_record
from overflow_fast.__main__ import main
from overflow_fast.guard.files.json_text import line_bytes
from overflow_fast.tools.page.render import read_sources

ROOT = Path(__file__).parents[3]


def write_record(path, steps=3, **run):
    lines = [step_line(i, low=[1.0] * 4, high=[4.0] * 4) for i in range(steps)]
    path.write_bytes(head_lines(**run) + b"".join(map(line_bytes, lines)))
    return str(path)


def reported(folder, *paths):
    """The page that the command makes of some files."""
    page = folder / "run.html"
    assert main(["report", *map(str, paths), "-o", str(page)]) == 0
    return page.read_text()


def test_a_record_and_evidence_become_a_page(tmp_path, capsys, as_kept):
    bad_steps(tmp_path / "evidence", count=2, explain=False)
    record, page = write_record(tmp_path / "run.ofr"), str(tmp_path / "new" / "a.html")
    assert main(["report", record, str(tmp_path / "evidence"), "-o", page]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    text = Parsed(Path(page).read_text()).text
    assert text.index("Step 1: ") < text.index("Step 0: ")
    as_kept(Parsed(Path(page).read_text()).sections["Incident"])


def test_ranks_are_in_order_whatever_that_of_their_files(tmp_path):
    files = [
        write_record(tmp_path / f"run.rank{i}.ofr", rank=i, world_size=12)
        for i in (10, 2)
    ]
    assert Parsed(reported(tmp_path, *files)).meta["ranks"] == ["2", "10"]


def test_behind_a_restart_a_page_is_of_the_newest_run(tmp_path, capsys):
    files = [
        write_record(tmp_path / f"{name}.ofr", rank=rank, run=f"{name}", time=time)
        for name, rank, time in [
            ("run.rank0", 0, 1.0),
            ("run.rank1", 1, 2.0),
            ("run.rank1.2", 1, 9.0),
            ("run.rank0.2", 0, 8.0),
        ]
    ]
    page = tmp_path / "run.html"
    assert main(["report", *files, "-o", str(page)]) == 0
    told = capsys.readouterr()
    names = [record.path.name for record in read_sources(files).records]
    assert names == ["run.rank0.2.ofr", "run.rank1.2.ofr"]
    assert told.err.endswith("of earlier ones: run.rank0.ofr, run.rank1.ofr.\n")


def wrong_files(folder):
    (folder / "no.ofr").write_text("no record")
    (folder / "empty").mkdir()
    (folder / "newer.ofr").write_bytes(head_lines(schema=99))
    (folder / "broken").mkdir()
    marker = '{"schema": 1, "kind": "evidence", "step": 3}'
    (folder / "broken" / "overflow_fast.json").write_text(marker)
    (folder / "broken" / "report.json").write_text('{"schema": 1, "kin')
    (folder / "notes.html").write_text("my notes")
    write_record(folder / "run.ofr")
    write_record(folder / "again.ofr")


@pytest.mark.parametrize(
    "paths",
    [
        ["gone.ofr"],
        ["no.ofr"],
        ["newer.ofr"],
        ["empty"],
        ["broken"],
        ["run.ofr", "again.ofr"],
        ["run.ofr", "-o", "notes.html"],
    ],
)
def test_what_cannot_be_done_is_said(paths, tmp_path, capsys, monkeypatch, as_kept):
    wrong_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *paths]) == 2
    as_kept(capsys.readouterr().err)
    assert not Path("run.html").exists()


def test_files_of_a_killed_run_are_shown_as_far_as_they_go(tmp_path, as_kept):
    path = tmp_path / "run.ofr"
    write_record(path)
    path.write_bytes(path.read_bytes()[:-40])
    found = Parsed(reported(tmp_path, path))
    as_kept(found.sections["Coverage"])
    assert len(found.meta["columns"]) == 2


def test_what_stands_in_backticks_is_code_and_nothing_else_is(tmp_path):
    sentences = ["The weight `h.0.w` is `nan`.", "So is `<b>`."]
    report = {"schema": 1, "sentences": sentences}
    (tmp_path / "overflow_fast.json").write_text('{"schema": 1, "step": 3}')
    (tmp_path / "report.json").write_text(json.dumps(report))
    text = reported(tmp_path, tmp_path)
    assert "<code>h.0.w</code> is <code>nan</code>.</h3>" in text
    assert "<li>So is `&lt;b&gt;`.</li>" in text


def test_an_installed_package_has_the_files_that_are_no_code():
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^overflow_fast = (\[.*?\])$", text, re.M | re.S)
    patterns = re.findall(r'"([^"]+)"', listed[1])
    package = ROOT / "overflow_fast"
    code = ".py", ".pyc", ".so", ".md"
    files = [path for path in package.rglob("*.*") if path.suffix not in code]
    names = [path.relative_to(package).as_posix() for path in files if path.is_file()]
    assert "tools/page/page.html" in names
    for name in names:
        assert any(fnmatch(name, pattern) for pattern in patterns), name


# Beside the evidence of an incident.


def incident_of(page):
    """Its text, without the numbers of lines, which are those of a helper's file."""
    text = Parsed(page.read_text()).sections["Incident"]
    return re.sub(r"(?m)^ +\d+\b", "  N", text)


def test_an_incident_has_a_page_beside_its_evidence(tmp_path, as_kept):
    guard, _ = bad_steps(tmp_path, count=1, record=tmp_path / "run.ofr")
    report = guard.last_report
    page = Path(report.evidence) / "page.html"
    assert report.page == str(page)
    assert str(page) in " ".join(report.sentences())
    assert str(page) in (Path(report.evidence) / "report.txt").read_text()
    shown = Parsed(page.read_text()).text
    assert "Step 0: " in shown
    assert report.explanation is not None  # which the card shows in parts of its own
    for sentence in report.sentences()[1:]:
        if "`" not in sentence:
            assert sentence in shown, sentence
    assert "replays   " not in shown
    as_kept(incident_of(page))
    assert shown.count(str(report.evidence)) == 1
    main(["report", str(report.evidence), "-o", str(tmp_path / "again.html")])
    as_kept(incident_of(tmp_path / "again.html"))


@pytest.mark.parametrize("num_clean", [0, 3])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_the_page_has_the_record_up_to_the_incident(
    tmp_path, policy, num_clean, as_kept
):
    model, optimizer = make()
    record, folder = tmp_path / "run.ofr", tmp_path / "evidence"
    with OverflowGuard(model, optimizer, policy, evidence=folder, record=record) as g:
        train(model, optimizer, batches(num_clean))
        with contextlib.suppress(NonFiniteError), plant(model.head, NAN):
            train_step(model, optimizer, batches(1)[0])
        train(model, optimizer, batches(1))
    shown = Parsed(Path(g.last_report.page).read_text())
    last = f"to {num_clean}" if num_clean else "0"
    assert "blocks.0.fc1" in shown.text and f"{last}, " in shown.text
    as_kept(shown.sections["Coverage"])
    kept = read_record(record)
    assert [step.first for step in kept.steps] == list(range(num_clean + 2))
    assert kept.is_nonfinite().any(1).tolist() == [
        step == num_clean for step in range(num_clean + 2)
    ]
    assert kept.run["run"] in shown.text
    assert kept.run["run"] == Path(g.last_report.evidence).parent.name


@pytest.mark.parametrize("share, num", [(0.0, 1), (1e9, 3)])
def test_pages_are_left_out_where_they_take_too_much_time(
    share, num, tmp_path, monkeypatch
):
    monkeypatch.setattr("overflow_fast.guard.archive._PAGE_SHARE", share)
    guard, _ = bad_steps(tmp_path, count=3, explain=False)
    pages = sorted(path.parent.name for path in tmp_path.rglob("page.html"))
    assert pages == [f"step-{i:08d}" for i in range(num)]
    assert (guard.last_report.page is None) == (num == 1)


def test_a_page_that_cannot_be_made_costs_no_report(
    tmp_path, monkeypatch, caplog, as_kept
):
    def fail(*_):
        raise RuntimeError("no jinja")

    monkeypatch.setattr("overflow_fast.tools.page.guard_page.page_of", fail)
    guard, _ = bad_steps(tmp_path)
    assert (guard.num_skipped, guard.last_report.page) == (1, None)
    as_kept(caplog.messages[0])
    assert (Path(guard.last_report.evidence) / "report.txt").exists()
