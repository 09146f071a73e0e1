"""Formats follow from the declarations of their fields: what is written and read."""

import itertools
import json
from pathlib import Path
from typing import Annotated, get_args

import pytest
import torch
from flight_records import step_line
from guarding import INF, batches, make, plant, train_step
from msgspec import UNSET, Struct, field
from pages import ROOT

import overflow_fast
from overflow_fast import Explanation, OverflowGuard
from overflow_fast.explainer import step_file
from overflow_fast.guard.files.fields import (
    FIRST_RELEASE,
    Number,
    default_of,
    fields_of,
    meaning,
    meaning_of,
    said_of,
    tag_of,
)
from overflow_fast.guard.files.json_text import dumps, line_bytes
from overflow_fast.guard.files.reading import FileError
from overflow_fast.guard.files.schema import convert, decode, decode_document
from overflow_fast.guard.record import record_lines
from overflow_fast.guard.record.folding import fold
from overflow_fast.guard.record.record_step import OfSteps
from overflow_fast.guard.report import log_lines
from overflow_fast.guard.report.remedy import Elsewhere, Remedy
from overflow_fast.tools.compare import recording_schema
from overflow_fast.tools.page import evidence_schema
from overflow_fast.tools.record.table import FlightRecord

pytestmark = pytest.mark.day  # a contract: all of its cases

FORMATS = {
    "run.ofr": record_lines,
    "guard.jsonl": log_lines,
    "recording/rank-0.step-0.jsonl": recording_schema,
}
DOCUMENTS = {
    "overflow_fast.json": evidence_schema.Marker,
    "report.json": evidence_schema.SavedReport,
    "explanation.json": evidence_schema.SavedExplanation,
    step_file.STEP: step_file.SavedStepFile,
}
RELEASES = sorted(path.name for path in (ROOT / "tests" / "files").iterdir())
PARTS = {
    record_lines.EntriesLine: ("entries", record_lines.EntryName),
    record_lines.StepsLine: ("models", record_lines.Columns),
}
# Of tensors that ranks share, that cannot be read, or for which there is no room; of
# later calls of a module; of non-finite values.
RARE = {"part", "local", "why", "left_out", "call", "num_nan", "num_inf"}
EVERY = [
    pytest.param(name, kind, field, id=f"{name}-{tag_of(kind)}-{field}")
    for name, module in FORMATS.items()
    for kind in module.KINDS
    for field in fields_of(kind)
]


def lines_in(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that a run writes now."""
    where = tmp_path_factory.mktemp("written")
    model, optimizer = make()
    paths = {"record": where / "run.ofr", "log": where / "guard.jsonl"}
    with OverflowGuard(model, optimizer, "skip", **paths):
        for i, batch in enumerate(batches(2)):
            with plant(model.head, INF) if i else torch.enable_grad():
                train_step(model, optimizer, batch)
    with overflow_fast.recording(where / "recording", model):
        train_step(model, optimizer, batches(1)[0])
    return where


class _Exponential(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).abs().exp()


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """A folder of evidence that a run writes now."""
    model = _Exponential(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    where = tmp_path_factory.mktemp("evidence")
    with OverflowGuard(model, optimizer, "skip", evidence=where):
        for size in (1.0, 1e4):
            model(torch.full((3, 2), size)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (marker,) = where.rglob("overflow_fast.json")
    return marker.parent


def parts_of(kind, lines):
    """The lines, or the parts in them, that have the fields of one declaration."""
    yield kind, lines
    if kind in PARTS:
        name, part = PARTS[kind]
        yield part, list(itertools.chain(*(line[name] for line in lines)))


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_declared_is_written_and_nothing_else(name, folder):
    for kind in FORMATS[name].KINDS:
        now, before = (
            [line for line in lines_in(where, name) if line["kind"] == tag_of(kind)]
            for where in (folder, ROOT / "tests" / "files" / RELEASES[-1])
        )
        parts = zip(parts_of(kind, now), parts_of(kind, before), strict=True)
        for (part, mine), (_, theirs) in parts:
            keys = {each.encode_name for each in fields_of(part).values()}
            keys |= {"kind"} if part is kind else set()
            found = set().union(*mine)
            assert found <= keys
            assert keys - found - set().union(*theirs) <= RARE


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name, kind, field", EVERY)
def test_a_field_may_be_missing_if_it_has_a_default(name, kind, field, release):
    lines = lines_in(ROOT / "tests" / "files" / release, name)
    line = next(each for each in lines if each["kind"] == tag_of(kind))
    declared = fields_of(kind)[field]
    line.pop(declared.encode_name, None)
    if declared.required:
        with pytest.raises(FileError, match="required"):
            decode(json.dumps(line), kind)
    else:
        assert isinstance(decode(json.dumps(line), kind), kind)


@pytest.mark.parametrize("name, kind, field", EVERY)
def test_a_field_that_came_later_has_a_default(name, kind, field):
    declared = fields_of(kind)[field]
    assert said_of(declared, "since") == FIRST_RELEASE or not declared.required
    assert meaning_of(declared)


LATER = [name for name, each in fields_of(OfSteps).items() if not each.required]


@pytest.mark.parametrize("name", LATER)
def test_a_step_that_lacks_a_field_has_its_default_also_if_it_is_folded(name):
    field = fields_of(OfSteps)[name]
    lines = []
    for number in range(2):
        written = json.loads(line_bytes(step_line(number)))
        del written[field.encode_name]
        lines.append(decode(line_bytes(written), record_lines.StepsLine))
    record = FlightRecord(Path("run.ofr"), [{}, *lines, fold(lines, 1)], False, 0)
    assert [getattr(step, name) for step in record.steps] == [default_of(field)] * 3


# Files of one object: evidence.


def fields_within(kind, found, at=""):
    """Yields each Struct of a file, with an object that it declares."""
    yield kind, found, at
    for name, each in fields_of(kind).items():
        value = found.get(each.encode_name)
        parts = value if isinstance(value, list) else [value]
        for inner in parts_in(each.type):
            for part in parts:
                if isinstance(part, dict):
                    yield from fields_within(inner, part, f"{at}.{name}")


def parts_in(kind):
    """The Structs in a type."""
    if isinstance(kind, type) and not get_args(kind) and issubclass(kind, Struct):
        return [kind]
    return [part for each in get_args(kind) for part in parts_in(each)]


def document(path):
    """What a file of evidence holds, in dicts and lists."""
    if path.name == step_file.STEP:
        return torch.load(path, weights_only=True)
    return json.loads(path.read_text())


def decoded(whole, name):
    """Such a document as its reader decodes it."""
    if name == step_file.STEP:
        return convert(whole, DOCUMENTS[name])
    return decode_document(json.dumps(whole).encode(), DOCUMENTS[name], 1)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_declared_of_evidence_is_written_and_nothing_else(name, evidence):
    found = document(evidence / name)
    names = []
    for kind, part, at in fields_within(DOCUMENTS[name], found):
        declared = {each.encode_name for each in fields_of(kind).values()}
        written_now = part.keys() - ({"kind"} if not at else set())
        assert written_now | ({"schema"} & declared) == declared, at
        names.append(at)
    more = {"report.json": ".explanation.op.inputs", step_file.STEP: ".calls.ambient"}
    assert more.get(name, "") in names


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_evidence_of_a_release_is_read_also_if_fields_are_missing(name, release):
    (path,) = (ROOT / "tests" / "files" / release).rglob(name)
    whole = document(path)
    assert decoded(whole, name)
    parts = list(fields_within(DOCUMENTS[name], whole))
    assert len(parts) > 2 or name == "overflow_fast.json"
    for kind, part, at in parts:
        for key, each in fields_of(kind).items():
            own = each.encode_name
            if own not in part:
                continue
            value = part.pop(own)
            if each.required:
                with pytest.raises(FileError, match="required"):
                    decoded(whole, name)
            else:
                assert decoded(whole, name), (at, key)
            part[own] = value


def test_a_dataclass_declares_what_is_written_of_it():
    declared = fields_of(evidence_schema.saved_as(Remedy))
    assert declared["tried"].default is True and declared["text"].default is UNSET
    losses = fields_of(evidence_schema.saved_as(Elsewhere))["losses"]
    assert get_args(losses.type)[0] == tuple[Number, Number] | None
    assert "artifacts" not in fields_of(evidence_schema.saved_as(Explanation))


# The declarations themselves.


class _Line(Struct, tag_field="kind", tag="x", kw_only=True):
    """A line."""

    first: Annotated[int, meaning("the first")] = field(name="1st")
    second: Annotated[list[int], meaning("the second")] = []


class _Text(str):
    """A text of a type of its own, as `torch.__version__` is."""


def test_a_line_has_its_kind_in_front_and_its_fields_in_order():
    line = _Line(second=[2, _Text("three")], first=1)
    text = '{"kind": "x", "1st": 1, "second": [2, "three"]}'
    assert line_bytes(line).decode() == f"{text}\n" and dumps(line) == text


def test_a_default_is_made_anew_for_each_line():
    one, two = (decode('{"kind": "x", "1st": 1}', _Line) for _ in range(2))
    assert one.second == [] and one.second is not two.second
