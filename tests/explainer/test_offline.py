"""What a bad step leaves runs elsewhere: the operation alone, and the whole step."""

import collections
import enum
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

from overflow_fast import Explanation
from overflow_fast.explainer.bad_step import BadStep
from overflow_fast.explainer.calls import Call, made_again
from overflow_fast.explainer.explain import investigate
from overflow_fast.explainer.explain_folder import explain_folder, function_at
from overflow_fast.explainer.step_file import UnreadableStepError
from overflow_fast.guard.kept_calls.ambient import Ambient
from overflow_fast.guard.kept_calls.kept_call import KeptCall

pytestmark = pytest.mark.usefixtures("untried")

ROOM = 2**20


class Net(nn.Module):
    """Divides 0 by 0 where its mask is empty, and draws random numbers before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, mask, *, scale=1.0, extra=None):
        hidden = self.drop(self.norm(self.layer(x))) * scale
        mean = (hidden * mask).sum() / mask.sum()
        return {"loss": mean, "hidden": hidden}


def batch():
    return torch.randn(3, 4), torch.zeros(3, 4)


def model_call(model, *args, **kwargs):
    return made_again(KeptCall(model, (args, kwargs), Ambient(model, [])))


def run_call(model, values, function):
    call = Call(function, values, Ambient(model, []))
    call.returns_loss = True
    return call


def left_by(tmp_path, model, call, room=ROOM):
    found = investigate(BadStep({"": model}, [call]), artifact_bytes=room)
    for each in found.artifacts:
        torch.save(each.content, tmp_path / each.name)
    return found


def changed(tmp_path, change):
    """The file of the step, as somebody else might have made it."""
    step = torch.load(tmp_path / "replay.pt", weights_only=True)
    change(step)
    torch.save(step, tmp_path / "replay.pt")


def place(found):
    op = found.op
    return found.phase, found.cause, found.module, op and (op.name, op.code)


@pytest.mark.tries_remedies
def test_a_step_of_the_model_is_explained_from_its_folder(tmp_path):
    model = Net()
    found = left_by(tmp_path, model, model_call(model, *batch(), scale=2.0))
    again = explain_folder(tmp_path, Net())
    assert isinstance(again, Explanation)
    assert place(again) == place(found)
    assert again.cause == "empty reduction"
    assert again.remedies[0].is_recommended
    assert again.remedies[0].loss == found.remedies[0].loss  # the same dropout


def test_a_step_of_a_function_needs_its_loss(tmp_path, as_kept):
    model = Net()
    x, mask = batch()
    call = run_call(model, {"x": x, "mask": mask}, lambda b: model(**b)["loss"])
    found = left_by(tmp_path, model, call)
    as_kept.error(UnreadableStepError, explain_folder, tmp_path, Net())
    loss = lambda model, b: model(b["x"], b["mask"])["loss"]  # noqa: E731
    again = explain_folder(tmp_path, Net(), loss)
    assert (again.cause, again.module) == (found.cause, found.module)


@pytest.mark.slow
@pytest.mark.tries_remedies
def test_weights_of_another_step_are_refused(tmp_path, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    other = Net()
    with torch.no_grad():
        other.layer.weight[0, 0] += 1
        other.norm.running_var[1] = 2
    as_kept.error(UnreadableStepError, explain_folder, tmp_path, other)
    as_kept(explain_folder(tmp_path, other, any_weights=True).notes[0])
    as_kept.error(UnreadableStepError, explain_folder, tmp_path, nn.Linear(2, 2))


class Runs:
    """Code that runs where it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: (d / "replay.pt").unlink(),
        lambda d: (d / "replay.pt").write_bytes(b"x"),
        lambda d: changed(d, lambda step: step.update(schema=99)),
        lambda d: changed(d, lambda step: step.pop("calls")),
        lambda d: torch.save([], d / "replay.pt"),
        lambda d: changed(d, lambda step: step.update(more=Runs())),
        lambda d: changed(d, lambda step: step.update(calls=[1])),
    ],
)
def test_broken_folders_are_said_in_a_sentence(tmp_path, spoil, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    spoil(tmp_path)
    as_kept.error(UnreadableStepError, explain_folder, tmp_path, Net())


@pytest.mark.tries_remedies
def test_another_torch_is_noted(tmp_path, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    changed(tmp_path, lambda step: step.update(torch="2.9.1"))
    as_kept(explain_folder(tmp_path, Net()).notes[0])


def test_an_argument_that_cannot_be_saved_is_named(tmp_path, as_kept):
    model = Net()
    call = model_call(model, *batch(), extra={"cache": object()})
    left_by(tmp_path, model, call)
    as_kept.error(UnreadableStepError, explain_folder, tmp_path, Net())


def test_what_is_too_large_is_left_out(tmp_path):
    model = Net()
    assert left_by(tmp_path, model, model_call(model, *batch()), room=4).artifacts == []


Point = collections.namedtuple("Point", "x mask")


class Mixed(Net):
    def forward(self, point, by_number, *, options):
        assert list(by_number) == [0, (1, "a")]
        loss = super().forward(*point, scale=by_number[0])["loss"]
        return {"loss": loss * options["scale"]}


@pytest.mark.tries_remedies
def test_types_that_are_not_json_come_back_or_are_named(tmp_path, as_kept):
    x, mask = batch()
    options = collections.OrderedDict(scale=1.0)
    model = Mixed()
    call = model_call(model, Point(x, mask), {0: 1.0, (1, "a"): x}, options=options)
    here = left_by(tmp_path, model, call)
    found = explain_folder(tmp_path, Mixed())
    assert place(found) == place(here) and found.op is not None
    as_kept(" ".join(found.notes))


def ambient(**values):
    return lambda call: call["ambient"].update(values)


@pytest.mark.parametrize(
    "made_up",
    [
        {"batch": 1},
        {"batch": ((), ())},
        {"held": {0: "x"}},
        ambient(random={"no device": torch.zeros(3)}),
    ],
)
def test_what_no_guard_writes_is_damage(made_up, tmp_path):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    make = made_up if callable(made_up) else lambda call: call.update(made_up)
    changed(tmp_path, lambda step: make(step["calls"][0]))
    with pytest.raises(UnreadableStepError, match=r"replay.pt is damaged: "):
        explain_folder(tmp_path, Net())


class Kind(str, enum.Enum):
    MEAN = "mean"

    def __str__(self):
        raise AssertionError


class Chosen(Net):
    def forward(self, x, mask, **chosen):
        kinds = [type(each) for each in chosen.values()]
        assert kinds == [str, int, float, float, str, tuple, list, bool, type(None)]
        assert chosen["kind"] == "mean" and x.requires_grad and mask.dtype == torch.half
        return super().forward(x, mask)


@pytest.mark.tries_remedies
def test_values_of_all_kinds_come_back(tmp_path):
    x, _ = batch()
    base = torch.zeros(8, 4, dtype=torch.half)  # of a view its own values are written
    chosen = {
        "kind": Kind.MEAN,
        "level": signal.SIGINT,
        "number": np.float64(2),
        "inf": float("inf"),
        "half": "\ud800",
        "shape": (1, (2, 3)),
        "list": [],
        "is": True,
        "none": None,
    }
    model = Net()
    forward = model.forward
    model.forward = lambda x, mask, **chosen: forward(x, mask)
    call = model_call(model, x.requires_grad_(), base[:3], **chosen)
    here = left_by(tmp_path, model, call)
    assert (tmp_path / "replay.pt").stat().st_size < 20000
    found = explain_folder(tmp_path, Chosen())
    assert found.cause == here.cause == "empty reduction"
    assert len([note for note in found.notes if "is a plain" in note]) == 3


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.down(x))


@pytest.mark.tries_remedies
def test_a_request_of_a_folder_is_explained_as_a_forward_alone(tmp_path):
    model = Wide().half()
    nn.init.constant_(model.down.weight, 1.0)
    call = model_call(model, torch.full((2, 8), 6e4).half())
    call.has_backward = False
    left_by(tmp_path, model, call)
    found = explain_folder(tmp_path, model)
    assert (found.cause, found.module) == ("range overflow", "down")
    assert found.remedies[0].is_recommended and found.remedies[0].error < 0.01


def test_the_folder_of_a_file_leaves_the_path_again(tmp_path):
    (tmp_path / "train.py").write_text("def build(): ...")
    before = sys.path.copy()
    assert callable(function_at("--model", f"{tmp_path}/train.py:build"))
    assert sys.path == before
