"""What C++ hands to Python has names: no position and no text is read."""

import ast
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from guarding import INF, batches, make, plant, train
from torch import nn

import overflow_fast
from overflow_fast import _C, OverflowGuard
from overflow_fast.detector.frames import BackwardFrame, frames_text
from overflow_fast.guard.report.advice import nonfinite_settings
from overflow_fast.guard.report.origin_words import who_made_it
from overflow_fast.guard.report.report import Report
from overflow_fast.guard.verdict.attribution import attribute
from overflow_fast.guard.verdict.bad_frames import BadFrame
from overflow_fast.guard.verdict.optimizer_settings import bad_settings
from overflow_fast.guard.verdict.verdict import (
    BadEntry,
    NonModuleOrigin,
    Origin,
    Verdict,
)

STUB = Path(overflow_fast.__file__).parent / "_C" / "__init__.pyi"
CLASSES = {
    node.name: node
    for node in ast.parse(STUB.read_text()).body
    if isinstance(node, ast.ClassDef)
}
RECORDS = ["LabelPart", "Label", "Stat", "Place", "Entry", "Peak", "HeadroomHistory"]


def attributes_of(stub):
    """The public names in a class of the stub."""
    fields = [n.target.id for n in stub.body if isinstance(n, ast.AnnAssign)]
    functions = [n.name for n in stub.body if isinstance(n, ast.FunctionDef)]
    return {name for name in fields + functions if not name.startswith("_")}


class Scaled(nn.Module):
    """Has parameters that are called as what a call is given and returns."""

    def __init__(self):
        super().__init__()
        self.input = nn.Parameter(torch.full((4,), 2.0))
        self.output = nn.Parameter(torch.full((4,), 3.0))

    def forward(self, x):
        return {"x": [x * self.input * self.output, None]}


@pytest.fixture
def watch():
    """The watch of a guard in whose step the output of a call is inf."""
    model = nn.Sequential(Scaled(), nn.Identity())
    watched = []
    with OverflowGuard(model, sync="lagged") as guard:
        watched += guard._parts.watches
        model(torch.full((2, 4), 3e38))
        results = watched[0].recorder.take_step_results()
    return watched[0], results.bad


def all_records(watch, frames):
    entries = [each for f in frames for each in watch.recorder.entries(f)]
    histories = watch.recorder.headroom()
    labels = [entry.label for entry in entries]
    return [
        *entries,
        *labels,
        *(part for label in labels for part in label.parts),
        *(entry.place for entry in entries),
        *(entry.stat for entry in entries if entry.stat is not None),
        *histories,
        *(history.last for history in histories),
    ]


def test_no_tuple_stands_in_the_stub():
    assert "tuple" not in STUB.read_text().lower()


@pytest.mark.day
@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_has_what_the_class_has(name):
    bound = getattr(_C, name)
    has = {each for each in vars(bound) if not each.startswith("_")}
    enum = {"name", "value"} if hasattr(bound, "__members__") else set()
    assert attributes_of(CLASSES[name]) >= has - enum
    assert all(hasattr(bound, each) for each in attributes_of(CLASSES[name]))


def test_records_have_names_alone(watch):
    records = all_records(*watch)
    assert {type(each).__name__ for each in records} == set(RECORDS)
    for each in records:
        with pytest.raises(TypeError):
            each[0]
        with pytest.raises(TypeError):
            iter(each)
        with pytest.raises(TypeError):
            pickle.dumps(each)
        for name in attributes_of(CLASSES[type(each).__name__]):
            with pytest.raises(AttributeError):
                setattr(each, name, None)


def test_records_show_their_attributes(watch):
    for each in all_records(*watch):
        kind = type(each).__name__
        assert repr(each).startswith(f"{kind}(")
        assert all(f"{name}=" in repr(each) for name in attributes_of(CLASSES[kind]))


def test_a_role_is_no_name(watch):
    watch, bad = watch
    found = [(e.label.name, e.role) for e in watch.recorder.entries(bad[0])]
    assert found == [
        ("input", _C.Role.WEIGHT),
        ("output", _C.Role.WEIGHT),
        ("input", _C.Role.INPUT),
        ("output", _C.Role.OUTPUT),
        ("output", _C.Role.OUTPUT),
    ]


def test_a_parameter_called_output_is_no_output(watch):
    watch, bad = watch
    labels = [history.last.place.label for history in watch.recorder.headroom()]
    # The parameter is finite; what was returned is inf.
    assert [each.role for each in labels if each.name == "output"] == [_C.Role.WEIGHT]
    first = attribute([BadFrame(watch, bad[0])]).first
    assert (first.kind, first.label, first.numel) == ("output", "output['x'][0]", 8)


def test_labels_are_equal_by_role_and_parts(watch):
    watch, bad = watch
    labels = [entry.label for entry in watch.recorder.entries(bad[0])]
    again = [entry.label for entry in watch.recorder.entries(bad[0])]
    for i, label in enumerate(labels):
        assert [label == other for other in again] == [i == j for j in range(5)]


def test_frames_of_gradients_are_not_known_by_their_text(as_kept):
    as_kept(frames_text(0, ["b (backward) Linear"]))
    assert "Last 1 frames:" in frames_text(0, [BackwardFrame("b Linear")])


def test_a_report_that_was_pickled_says_the_same():
    model, optimizer = make()
    with OverflowGuard(model, optimizer, on_overflow="warn") as guard:
        with plant(model.blocks[0], backward=True):
            train(model, optimizer, batches(1))
    report = guard.last_report
    assert "forward frames:" not in str(report)
    other = pickle.loads(pickle.dumps(report))
    assert str(other) == str(report)
    assert other.to_json() == report.to_json()


def test_the_training_loop_is_no_module_of_that_name(as_kept):
    first = BadEntry("input", "head", "Linear", "input[0]", numel=4, num_nan=1)
    name = "the training loop"
    origin = Origin("passed_on", "caller", name, [NonModuleOrigin(name)])
    of_loop = Verdict(first=first, origin=origin)
    of_module = Verdict(first=first, origin=replace(origin, candidates=[name]))
    as_kept(who_made_it(first, of_loop, "step"))
    as_kept(who_made_it(first, pickle.loads(pickle.dumps(of_loop)), "step"))
    as_kept(who_made_it(first, of_module, "step"))


def test_settings_are_not_known_by_their_text(as_kept):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=INF)
    remarks = bad_settings([optimizer])
    as_kept(remarks)
    as_kept(nonfinite_settings(remarks))
    assert nonfinite_settings([str(each) for each in remarks]) == []
    report = Report(0, "warn", Verdict(origin=Origin(remarks=remarks)))
    remarks = pickle.loads(pickle.dumps(report)).verdict.origin.remarks
    as_kept(nonfinite_settings(remarks))
