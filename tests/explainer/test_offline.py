"""What a bad step leaves runs elsewhere: the operation alone, and the whole step."""

import collections
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from overflow_fast import Explanation
from overflow_fast.explainer.calls import Call, ModelCall
from overflow_fast.explainer.explain import investigate
from overflow_fast.explainer.explain_folder import explain_folder
from overflow_fast.explainer.saved_step import UnreadableStepError
from overflow_fast.guard.kept_calls.ambient import Ambient

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
    return ModelCall.of(model, (args, kwargs), Ambient(model, []))


def run_call(model, values, function):
    call = Call(function, values, Ambient(model, []))
    call.returns_loss = True
    return call


def left_by(tmp_path, model, call, room=ROOM):
    found = investigate({"": model}, [call], artifact_bytes=room)
    for each in found.artifacts:
        if each.tensors:
            save_file(each.tensors, tmp_path / each.name)
        else:
            (tmp_path / each.name).write_text(each.text)
    return found


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
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, Net())
    as_kept(raised.value)
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
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, other)
    as_kept(raised.value)
    found = explain_folder(tmp_path, other, any_weights=True)
    as_kept(found.notes[0])
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, nn.Linear(2, 2))
    as_kept(raised.value)


def broken(tmp_path, name, text):
    (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: (d / "replay.json").unlink(),
        lambda d: (d / "replay.safetensors").unlink(),
        lambda d: broken(d, "replay.json", "{"),
        lambda d: broken(d, "replay.safetensors", "x"),
        lambda d: broken(d, "replay.json", '{"schema": 99}'),
    ],
)
def test_broken_folders_are_said_in_a_sentence(tmp_path, spoil, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    spoil(tmp_path)
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, Net())
    as_kept(raised.value)


@pytest.mark.tries_remedies
def test_another_torch_is_noted(tmp_path, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    step = json.loads((tmp_path / "replay.json").read_text())
    step["torch"] = "2.9.1"
    broken(tmp_path, "replay.json", json.dumps(step))
    as_kept(explain_folder(tmp_path, Net()).notes[0])


def test_an_argument_that_cannot_be_saved_is_named(tmp_path, as_kept):
    model = Net()
    call = model_call(model, *batch(), extra={"cache": object()})
    left_by(tmp_path, model, call)
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, Net())
    as_kept(raised.value)


def test_what_is_too_large_is_left_out(tmp_path):
    model = Net()
    assert left_by(tmp_path, model, model_call(model, *batch()), room=4).artifacts == []


Point = collections.namedtuple("Point", "x mask")


class Mixed(Net):
    def forward(self, point, by_number, *, options):
        assert point._fields == ("x", "mask") and list(by_number) == [0, (1, "a")]
        loss = super().forward(point.x, point.mask, scale=by_number[0])["loss"]
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
    notes = " ".join(found.notes)
    as_kept(notes)


@pytest.mark.parametrize(
    "made_up",
    [
        {"named": {"class": {"value": 1}}, "was": "Point"},
        {"named": {"__init__": {"value": 1}}, "was": "Point"},
        {"named": {"x": {"value": 1}}, "was": "a\nb(); import os"},
        {"named": {"x": {"value": 1}}},
        {"items": [[{"list": []}, {"value": 1}]]},
        {"items": [[{"value": 1}]]},
    ],
)
def test_a_made_up_type_is_damage(made_up, tmp_path, as_kept):
    model = Net()
    left_by(tmp_path, model, model_call(model, *batch()))
    step = json.loads((tmp_path / "replay.json").read_text())
    step["calls"][0]["batch"] = made_up
    broken(tmp_path, "replay.json", json.dumps(step))
    with pytest.raises(UnreadableStepError) as raised:
        explain_folder(tmp_path, Net())
    as_kept(str(raised.value).partition(": ")[0])


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
    assert found.remedies[0].is_recommended and found.remedies[0].distance < 0.01
