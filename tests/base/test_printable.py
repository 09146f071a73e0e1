"""No name forges a line or reaches a terminal with a control character in it."""

import io
import json
import logging
import unicodedata

import pytest
import torch
from guarding import NAN
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard, read_record
from overflow_fast.__main__ import main
from overflow_fast.base.text import either, numbered, printable, some
from overflow_fast.detector.frames import get_abs_min_max

FORGED = "a\x1b[2J\n[overflow_fast] All is well\r\x9b\u2028\u202e\x7fb"
FIT = "a\tλ 漢字 🔥 é\xa0b"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("h.0.attn: output[0]", "h.0.attn: output[0]"),
        (FIT.replace("\t", ""), FIT.replace("\t", "")),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\r\t\0", r"a\nb\r\t\x00"),
        ("\x85\x9b\x7f", r"\x85\x9b\x7f"),
        (
            "\u2028\u2029\u202a\u202e\u2066\u2069",
            r"\u2028\u2029\u202a\u202e\u2066\u2069",
        ),
        ("\ud800", r"\ud800"),
        ("a\u200b\u200d\u200e\ufeff\xad", r"a\u200b\u200d\u200e\ufeff\xad"),
        ("\u061c\u2060\U000e0041", r"\u061c\u2060\U000e0041"),
    ],
)
def test_what_is_no_part_of_a_line_is_escaped_once(text, shown):
    assert printable(text) == shown == printable(printable(text))
    assert printable(text, keep="\n").count("\n") == text.count("\n")


def is_clean(text):
    forged = [
        each for each in text.splitlines() if each.startswith("[overflow_fast] All")
    ]
    bad = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")]
    return not forged and not bad and "\u202e" not in text and "\u2028" not in text


@pytest.fixture
def logged():
    """What a plain handler writes of the package's logger."""
    out, log = io.StringIO(), logging.getLogger("overflow_fast")
    handler = logging.StreamHandler(out)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield out
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def test_a_name_in_a_message_ends_no_line(logged):
    log = logging.getLogger("overflow_fast")
    log.warning("The file %s is %s.", FORGED, OSError(FORGED))
    log.warning("%s", f"ours\n{printable(FORGED)}")
    assert is_clean(logged.getvalue())
    assert logged.getvalue().count("\n") == 3


def test_names_of_modules_reach_no_text_as_they_are(tmp_path, capsys, logged):
    model = nn.Sequential()
    model.add_module(FORGED, nn.Linear(6, 6))
    model.add_module("last", nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paths = {"log": tmp_path / "l.jsonl", "record": tmp_path / "r.ofr"}
    with OverflowGuard(
        model, optimizer, "warn", evidence=tmp_path / "e", **paths
    ) as guard:
        for value in (1.0, NAN):
            guard.record(**{FORGED: torch.ones(())})
            model(torch.full((2, 6), value)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = guard.last_report
    names = {each.module for each in read_record(paths["record"]).entries}
    assert FORGED in names  # for programs, as it is
    texts = [str(report), str(report.explanation), str(guard.headroom())]
    texts += [str(guard.coverage()), report._repr_html_(), logged.getvalue()]
    for path in (tmp_path / "e").rglob("*"):
        if path.suffix in (".txt", ".html"):
            texts.append(path.read_text())
    page = tmp_path / "page.html"
    for command in (
        ["suspects", str(paths["log"])],
        ["suspects", "--json", str(paths["log"])],
        ["report", str(paths["record"]), str(tmp_path / "e"), "-o", str(page)],
    ):
        assert main(command) == 0
    texts += [*capsys.readouterr(), page.read_text()]
    assert [text for text in texts if not is_clean(text)] == []
    assert any(r"\x1b[2J\n[overflow_fast]" in text for text in texts)


def test_a_comparison_shows_names_escaped(tmp_path, capsys):
    for name, scale in (("a", 1.0), (f"{printable(FORGED)}", 2.0)):
        torch.manual_seed(0)
        model = nn.Sequential()
        model.add_module(FORGED, nn.Linear(6, 6))
        with overflow_fast.recording(tmp_path / name, model):
            model(torch.ones(2, 6) * scale).sum().backward()
    found = overflow_fast.compare(*sorted(tmp_path.iterdir()))
    page = found.to_html(tmp_path / "diff.html")
    assert is_clean(str(found)) and is_clean(found.verdict())
    assert is_clean(page.read_text())
    assert any(FORGED in row.place.module for row in found.rows)


def test_fields_of_a_made_up_log_are_escaped(tmp_path, capsys):
    path = tmp_path / f"x{chr(27)}.jsonl"
    run = {"kind": "run", "schema": 1, "overflow_fast": "1", "run": FORGED, "rank": 0}
    step = {"kind": "step", "step": 1, "is_clean": False, "first": FORGED}
    other = {"kind": FORGED, FORGED: FORGED}
    path.write_text("".join(f"{json.dumps(each)}\n" for each in (run, step, other)))
    assert main(["suspects", str(path)]) == 0
    assert main(["suspects", "--json", str(path)]) == 0
    path.write_text("{}\n")
    assert main(["suspects", str(path)]) == 2
    assert all(map(is_clean, capsys.readouterr()))


def test_the_drop_in_escapes_names_and_nothing_else():
    assert get_abs_min_max(torch.ones(1), "weight") == "1.00e+00 1.00e+00 weight"
    assert is_clean(get_abs_min_max(torch.ones(1), FORGED))


@pytest.mark.parametrize(
    "arguments",
    [
        [FORGED],
        ["suspects", "x", f"--{FORGED}"],
        ["doctor", "--seconds", FORGED],
        ["suspects", FORGED],
        ["compare", FORGED, FORGED],
        ["explain", FORGED, "--model", "x.py:f"],
    ],
)
def test_an_argument_ends_no_line_of_an_error(arguments, capsys):
    try:
        assert main(arguments) == 2
    except SystemExit as error:
        assert error.code == 2
    assert is_clean(capsys.readouterr().err)


def test_lists_are_cut_in_words():
    assert either(["a"]) == "a"
    assert either("abc") == "a, b or c"
    assert either("abcdefgh", 6) == "a, b, c, d, e, f or one of 2 more"
    assert either("abc", 3) == "a, b or c"
    assert some("abc", 3) == "a, b, c"
    assert some("abcd", 3) == "a, b, c and 1 more"


@pytest.mark.parametrize(
    "numbers, shown",
    [
        ([4], "step 4"),
        ([0, 5], "steps 0 and 5"),
        ([0, 1, 2], "steps 0 to 2"),
        ([0, 1, 3], "steps 0, 1, 3"),
        ([0, 2, 4, 6, 8, 10, 12], "steps 0, 2, 4, 6, 8, 10 and 1 more"),
    ],
)
def test_numbers_in_a_row_are_a_range(numbers, shown):
    assert numbered("step", numbers) == shown
