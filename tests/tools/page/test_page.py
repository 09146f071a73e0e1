"""What a page says without JavaScript, and what it carries for its pictures."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from evidence_folders import bad_steps, step_folders
from flight_records import head_lines
from guarding import INF, batches, make, plant, train_step
from page_records import HOSTILE, LIMIT, Parsed, entry, parsed, record_of

from overflow_fast import OverflowGuard, read_record
from overflow_fast.base.text import printable
from overflow_fast.tools.page import payloads
from overflow_fast.tools.page.columns import Column, downsampled
from overflow_fast.tools.page.failure_path import failure_path
from overflow_fast.tools.page.grid import (
    ALL_ZERO,
    BITS,
    NONFINITE,
    NOT_SEEN,
    Sheet,
    block_of,
)
from overflow_fast.tools.page.incidents import Incident, read_incidents
from overflow_fast.tools.page.render import page_of, write_page

NAN = float("nan")


def numbers(payload, shape, is_wide):
    """The codes of a payload as the page's script makes them of its differences."""
    size = shape[0] * shape[1]
    planes = [torch.frombuffer(bytearray(payload), dtype=torch.uint8).int()]
    whole = planes[0][:size] + (planes[0][size:] * 256 if is_wide else 0)
    summed = whole.view(shape).cumsum(1) % (65536 if is_wide else 256)
    return torch.where(is_wide & (summed >= 32768), summed - 65536, summed)


# The codes.


def test_cells_are_headroom_in_bits_and_what_is_no_number():
    high = torch.tensor([[LIMIT, LIMIT / 2, 0.0], [NAN, LIMIT / 4, NAN]])
    page = parsed([record_of(high, nans=torch.tensor([[0, 0, 0], [3, 0, 0]]))])
    codes = numbers(page.payloads["headroom"], (3, 2), True)
    expected = [[0, NONFINITE], [BITS, 2 * BITS], [ALL_ZERO, NOT_SEEN]]
    assert codes.tolist() == expected


def test_counts_are_carried_where_they_were_counted(as_kept):
    high = torch.ones(2, 2)
    counts = {"num_zero": torch.tensor([[0, 4], [-1, 1]])}
    page = parsed([record_of(high, counts=counts)])
    codes = numbers(page.payloads["num_zero"], (2, 2), False)
    assert codes.tolist() == [[1, 0], [10, 2]]
    assert "num_saturated" not in page.payloads
    assert [row["zeros"] for row in page.table("Entries")] == ["0", "4"]
    as_kept(page.sections["Coverage"])


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_random_magnitudes_survive_the_packing(scale):
    high = torch.rand(40, 7) * LIMIT * scale
    codes = numbers(parsed([record_of(high)]).payloads["headroom"], (7, 40), True)
    torch.testing.assert_close(
        codes / BITS, (LIMIT / high.double()).log2().T.float(), atol=0.5 / BITS, rtol=0
    )


def test_the_least_of_ranks_is_drawn_and_each_rank_is_kept(as_kept):
    spread = torch.tensor([[1.0, 8.0], [2.0, 4.0]])
    records = [
        record_of(LIMIT / row.expand(3, 2), rank=i, world_size=3)
        for i, row in enumerate(spread)
    ]
    page = parsed(records)
    whole = numbers(page.payloads["headroom"], (2, 3), True)
    assert whole.tolist() == [[0] * 3, [2 * BITS] * 3]
    ranks = numbers(page.payloads["ranks"], (4, 3), True)
    assert (ranks[:, 0] / BITS).tolist() == [0, 3, 1, 2]
    assert [row["rank"] for row in page.table("Entries")] == ["0", "1"]
    as_kept(page.sections["Coverage"])


def test_ranks_may_have_entries_of_their_own():
    records = [
        record_of(torch.full((1, 2), LIMIT), [entry(a), entry(b)], rank=i)
        for i, (a, b) in enumerate([("a", "b"), ("b", "c")])
    ]
    sheet = Sheet(records)
    assert [each.module for each in sheet.entries] == ["a", "b", "c"]
    assert sheet.grid(9).headroom.tolist() == [[0], [0], [0]]
    own = sheet.headroom_of(1, sheet.columns(9))
    assert own.tolist() == [[NOT_SEEN], [0], [0]]


# Columns.


def test_steps_that_one_rank_keeps_together_are_one_column():
    whole = record_of(torch.ones(4, 1))
    folded = record_of(torch.ones(3, 1), spans=[(0, 1), (2, 2), (3, 3)], rank=1)
    columns = Sheet([whole, folded]).columns(9)
    assert [str(column) for column in columns] == ["0 to 1", "2", "3"]
    assert columns[0].lines == [[0, 1], [0]]


def test_a_run_that_counts_from_0_again_keeps_its_order():
    spans = [(5, 5), (6, 6), (0, 0)]
    columns = Sheet([record_of(torch.ones(3, 1), spans=spans)]).columns(9)
    assert [column.first for column in columns] == [5, 6, 0]


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 12, 1000, 100_000])
def test_of_too_many_columns_the_newest_stay_single(count):
    whole = [Column(i, i, [[i]]) for i in range(count)]
    columns = downsampled(whole, 10)
    assert len(columns) <= 10
    assert [i for each in columns for i in each.lines[0]] == list(range(count))
    assert all(each.first == each.last for each in columns[-5:])


def test_a_bad_value_is_in_the_column_that_its_step_was_folded_into():
    high, nans = torch.ones(5000, 2), torch.zeros(5000, 2)
    nans[17, 1] = 1
    page = parsed([record_of(high, nans=nans)])
    columns = page.meta["columns"]
    codes = numbers(page.payloads["headroom"], (2, len(columns)), True)
    (place,) = (codes == NONFINITE).nonzero().tolist()
    first, last = columns[place[1]]
    assert place[0] == 1 and first <= 17 <= last


# What a page says.


def test_an_empty_record(tmp_path, as_kept):
    path = tmp_path / "run.ofr"
    for text in (b"", head_lines()):
        path.write_bytes(text)
        page = parsed([read_record(path)])
        as_kept(page.text)
        assert page.payloads == {}


def test_nothing_at_all(as_kept):
    as_kept(parsed([]).text)


def test_the_first_bad_entry_is_named_without_evidence(as_kept):
    nans = torch.tensor([[0, 0], [0, 1], [1, 1]])
    page = parsed([record_of(torch.ones(3, 2), nans=nans)])
    as_kept(page.sections["A non-finite step"])
    rows = page.table("Entries")
    assert "rank" not in rows[0]
    assert [(r["non-finite steps"], r["first"]) for r in rows] == [
        ("1", "2"),
        ("2", "1"),
    ]
    steps = page.table("Steps")
    assert [r["least bits"] for r in steps] == ["16.0", "non-finite", "non-finite"]
    assert [r["non-finite"] for r in steps] == ["", "1", "2"]


def test_a_table_names_the_step_of_the_least_headroom():
    high = torch.tensor([[1.0, 0.0, NAN], [LIMIT / 2, 0.0, NAN], [4.0, 0.0, NAN]])
    rows = parsed([record_of(high)]).table("Entries")
    found = [(r["least bits"], r["magnitude"], r["in step"]) for r in rows]
    never = ("", "", "never checked")
    assert found == [("1.0", "3.275e+04", "1"), ("all 0", "0", "0"), never]


def named(name, file):
    """A record and an incident that have a name wherever one can stand."""
    entries = [entry(name), entry("h.0", label=name), entry("h.1", kind="weight")]
    ones = torch.ones(2, 3)
    record = record_of(ones, entries, ones, run=name, host=name)
    report = {
        "summary": name,
        "frames": [name],
        "not_covered": [name],
        "verdict": {"source": "module", "maker": name},
    }
    op = {"name": name, "code": name, "file": file or name, "line": 3}
    explanation = {"cause": name, "op": op, "evidence": [name], "chain": [name]}
    return [record], [Incident(1, report, explanation)]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_wherever_they_stand(name, tmp_path):
    file = "model.py" if "/" in name else ""  # of a path, the headline has the end
    page, plain = parsed(*named(name, file)), parsed(*named("plain", file))
    assert page.tags == plain.tags
    assert page.text.count(printable(name)) == plain.text.count("plain")
    written = write_page(tmp_path / "run.html", *named(name, file)).read_text("utf-8")
    assert written.count("</script>") == plain.tags.count("script")


def test_nothing_is_loaded_from_anywhere():
    page = page_of([record_of(torch.ones(2, 1))])
    assert "http" not in page and "import(" not in page
    assert parsed([record_of(torch.ones(2, 1))]).addresses == ["data:,"]


@pytest.mark.slow
def test_a_page_stays_below_2_mib():
    torch.manual_seed(0)
    high = 2 ** (torch.randn(3000, 300) * 4)
    counts = {name: (high * 50).long() for name in ("num_zero", "num_saturated")}
    page = page_of([record_of(high, counts=counts)] * 2)
    assert len(page) < 2 * 2**20


def test_ranks_without_room_have_no_rows_of_their_own(monkeypatch, as_kept):
    records = [record_of(torch.rand(40, 50), rank=i, world_size=4) for i in range(4)]
    as_kept(parsed(records).sections["Headroom"].partition("Entries:")[0])
    monkeypatch.setattr(payloads, "_MAX_RANKS", 1000)
    page = parsed(records)
    as_kept(page.sections["Headroom"].partition("Entries:")[0])
    assert page.meta["rankColumns"] == [] and "ranks" not in page.payloads


# Incidents.


def test_a_folder_of_evidence_becomes_a_card(tmp_path):
    bad_steps(tmp_path, explain=True)
    (folder,) = step_folders(tmp_path).values()
    for path in (folder, tmp_path):
        ((incident,), damaged) = read_incidents(path)
        assert not damaged
        page = parsed([], [incident])
        assert "blocks.1.fc2" in page.text
        assert "No record" not in page.text
        assert "nan" in page.text


CURE = {
    "file": "",
    "loss": None,
    "text": "add 1e-8 to the divisor",
    "code": "x / (s +\n    1e-8)",
    "tried": True,
}


def test_a_card_begins_with_cause_and_cure_and_the_code_to_copy(as_kept):
    first = {"label": "output", "class_name": "Norm", "fqn": "norm"}
    report = {"sentences": ["Step 3 is not finite."], "verdict": {"first": first}}
    op = {"name": "div", "file": "/a/model.py", "line": 5, "code": "x / s"}
    failed = {**CURE, "text": "no cure", "is_finite": False}
    remedies = [failed, {**CURE, "is_finite": True, "loss": 0.5}]
    found = {"cause": "undefined", "op": op, "remedies": remedies}
    incident = Incident(3, report, found)
    as_kept(incident.headline)
    text = page_of([], [incident])
    assert "1e-8)</pre><button" in text
    assert f"<p>{report['sentences'][0]}</p>" in text
    assert (
        text.index("<h3>Cause: undefined") < text.index("x / (s") < text.index("<dl>")
    )
    found = {"cause": "bad data", "tensor": "x[0]", "remedies": [failed]}
    as_kept(Incident(3, report, found).headline)
    # No cause is known: the headline says what happened.
    found = {"cause": "unknown", "tensor": "x[0]"}
    as_kept(Incident(3, report, found).headline)


def test_a_strip_that_is_always_0_is_not_drawn():
    meta = parsed([record_of(torch.ones(3, 2))]).meta
    assert "learning_rate" in meta["sparklines"] and "skips" not in meta["sparklines"]


def test_the_line_that_failed_has_its_neighbours(tmp_path, as_kept):
    path = tmp_path / "model.py"
    path.write_text("\n".join(f"line_{i}" for i in range(1, 10)))
    op = {"name": "div", "file": str(path), "line": 5, "code": "line_5"}
    code = Incident(0, {}, {"op": op}).code()
    assert code.lines == [(i, f"line_{i}") for i in range(2, 9)]
    path.write_text("another\n" * 9)
    code = Incident(0, {}, {"op": op}).code()
    assert code.lines == [(5, "line_5")]
    as_kept(code.remark)
    path.unlink()
    as_kept(Incident(0, {}, {"op": op}).code().remark)


def test_a_gradient_on_the_way_is_no_weight(as_kept):
    gradient = entry("h.0", "weight", "gradient")
    sheet = Sheet([record_of(torch.tensor([[NAN]]), [gradient], torch.tensor([[1]]))])
    as_kept(failure_path(Incident(0), sheet, sheet.grid(9)).stations)


def test_the_way_names_what_was_bad_and_counts_what_was_not(as_kept):
    entries = [entry(f"h.{i}.{name}") for i in range(2) for name in ("a", "b")]
    entries.append(entry("h.0.a", "output[1]"))
    nans = torch.tensor([[0, 0, 0, 1, 0]])
    high = torch.tensor([[1.0, 1.0, NAN, NAN, NAN]])
    sheet = Sheet([record_of(high, entries, nans)])
    report = {"verdict": {"source": "module", "maker": "h.1.b"}}
    path = failure_path(Incident(0, report), sheet, sheet.grid(9))
    assert path.stations == ["h.1.b: output"]
    h = path.tree.children["h"]
    assert list(h.children) == ["1"] and (h.num_finite, h.num_unseen) == (2, 0)
    assert h.children["1"].num_unseen == 1
    as_kept(h.children["1"].children["b"].marks)
    explained = Incident(0, report, {"module": "h.1"})
    path = failure_path(explained, sheet, sheet.grid(9))
    h = path.tree.children["h"].children["1"]
    as_kept(h.marks)
    assert h.children["b"].marks == ["non-finite: output"]  # one voice


# The guard's page.


def test_a_guard_writes_its_page(model, optimizer, tmp_path):
    path = tmp_path / "run.html"
    with OverflowGuard(model, optimizer, "skip", record=tmp_path / "run.ofr") as guard:
        for i, batch in enumerate(batches(3)):
            with plant(model.blocks[1].fc2, INF) if i == 1 else torch.enable_grad():
                train_step(model, optimizer, batch)
        assert guard.to_html(path) == path
        during = path.read_text()
    guard.to_html(path)
    assert "Step 1: " in during
    assert "the record" in path.read_text()


def test_a_guard_without_a_record_writes_its_report(tmp_path, as_kept):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip") as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
    page = Parsed(guard.to_html(tmp_path / "run.html").read_text())
    assert "Step 0: " in page.text
    as_kept(page.sections["Coverage"])


def test_only_a_page_is_written_over(tmp_path, as_kept):
    path = tmp_path / "notes.html"
    path.write_text("my notes")
    as_kept.error(FileExistsError, write_page, path, [])
    assert path.read_text() == "my notes"


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("", ""),
        ("h.0.attn.c_proj", "h.0"),
        ("transformer.h.11", "transformer.h.11"),
        ("transformer.wte", "transformer"),
        ("head", "head"),
    ],
)
def test_modules_are_folded_by_their_block(module, block):
    assert block_of(module) == block


NUMBERS = {1230.2: "1230", 1230: "1230", 0.5: "0.5", 1.00001: "1", 12300.5: "1.23e+4"}
NUMBERS |= {
    100.04: "100",
    1.5e-7: "1.5e-7",
    10.0: "10",
    20.30004: "20.3",
    2e30: "2e+30",
}


ENDS = {
    (1.0, 1.0): "1",
    (0.5, 2.0): "0.5 to 2",
    (0.99987, 0.99993): "0.99987 to 0.99993",
}


@pytest.mark.day
@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(
    "table, call", [(ENDS, "(v) => range(...v)"), (NUMBERS, "short")]
)
def test_numbers_have_the_digits_that_tell_them_apart(table, call):
    """Also the ends of a sparkline."""
    script = (Path(payloads.__file__).parent / "heatmap.js").read_text()
    functions = r"  const short = .*?\n  };\n|  function range.*?\n  }\n"
    code = "".join(re.findall(functions, script, re.DOTALL))
    code += f"console.log(JSON.stringify({json.dumps(list(table))}.map({call})))"
    done = subprocess.run(["node", "-e", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == list(table.values())


def test_gradients_stand_for_the_norm_where_nobody_gave_that():
    entries = [entry("h.0"), entry("", "w", "gradient"), entry("", "b", "gradient")]
    high = torch.tensor([[9.0, 1.0, 2.0], [9.0, 0.5, NAN], [9.0, 4.0, 1.0]])
    nans = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1, 0]])
    page = parsed([record_of(high, entries, nans)])
    shown = [row["largest gradient"] for row in page.table("Steps")]
    assert shown == ["2", "0.5", "nan"]


def test_a_clean_record_says_how_far_it_is_from_its_maximum(as_kept):
    page = parsed([record_of(torch.tensor([[1.0, 2.0], [LIMIT / 4, 1.0]]))])
    text = "h.0: output (float16) in step 1, which could grow 4-fold (2.0 bits)"
    assert text in page.text and "Incident" not in page.text
    as_kept(page.sections["No non-finite value"])


def test_a_single_record_s_versions_are_pairs_and_those_of_ranks_rows():
    records = [record_of(torch.ones(2, 2), rank=i, world_size=2) for i in range(2)]
    pairs = {row["field"]: row["value"] for row in parsed(records[:1]).table("Runs")}
    rows = parsed(records).table("Runs")
    assert pairs["rank"] == "0" and [row["rank"] for row in rows] == ["0", "1"]
    assert set(pairs) == set(rows[0])


def test_columns_in_which_nothing_stands_are_left_out():
    page = parsed([record_of(torch.ones(2, 2))])
    for name in ("Entries", "Steps"):
        heads = page.table(name)[0]
        assert "dtype" in heads or "least bits" in heads
        assert not {"non-finite", "non-finite steps", "first", "guard"} & set(heads)


def test_code_is_shown_without_the_indentation_that_all_lines_have(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("\n\n        a = 1\n            b = a / 0\n        \n\n")
    op = {"file": str(file), "line": 4, "code": "b = a / 0"}
    shown = Incident(0, {}, {"op": op}).code()
    assert shown.lines == [(3, "a = 1"), (4, "    b = a / 0")]


def test_the_expression_that_failed_is_marked_where_it_stands_once(tmp_path):
    op = {"name": "div", "code": "y = a / b + c / d", "columns": (4, 9)}
    (marked,) = re.findall(
        "<mark>(.*?)</mark>", page_of([], [Incident(0, {}, {"op": op})])
    )
    assert marked == "a / b"
    twice = {**op, "code": "y = a / b + a / b"}
    assert Incident(0, {}, {"op": twice}).code().failed == (twice["code"], "", "")


def test_a_title_names_script_machine_and_time_and_a_lone_incident_s_run(tmp_path):
    run = {"script": "train.py", "host": "n1", "started": "2026-01-02T03:04:05Z"}
    title = re.compile("<title>(.*)</title>")
    with_record = title.search(page_of([record_of(torch.ones(2, 2), **run)]))[1]
    run, script, host, time = with_record.split(", ")
    assert (run, script, host) == ("Run", "train.py", "n1")
    assert time.startswith("2026-01-02 03:04:05 UTC")
    alone = Incident(3, folder=tmp_path / "20260102T030405Z-n1-7" / "step-00000003")
    assert "20260102T030405Z-n1-7" in title.search(page_of([], [alone]))[1]


def test_a_remedy_of_two_lines_has_them_in_the_table_too():
    remedy = {"text": "leave it out of `x`", "code": "keep = x > 0\nx = x[keep]"}
    remedy |= {"tried": True, "is_finite": False, "file": ""}
    page = page_of([], [Incident(0, {}, {"remedies": [remedy]})])
    assert "\nx = x[keep]</code>" in page
    assert "<code>x</code>" in page


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["jobs/train.py", "-v"], "train.py"),
        (["/opt/tool/__main__.py"], "tool"),
        (["-c"], ""),
        ([""], ""),
        ([], ""),
    ],
)
def test_a_run_has_its_script(model, optimizer, argv, script, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", argv)
    with OverflowGuard(model, optimizer, record=tmp_path / "run.ofr"):
        train_step(model, optimizer, batches(1)[0])
    assert read_record(tmp_path / "run.ofr").run["script"] == script
