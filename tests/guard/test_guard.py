"""What the guard sees, and whom it blames."""

import dataclasses
import json

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, Net, batches, make, plant, train, train_step, warned
from pairs import pairs
from torch import nn

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard


def verdict_of(model, optimizer, batch, **arguments):
    report = warned(model, optimizer, batch, explain=False, **arguments)
    assert report is not None
    return report.verdict


def test_a_clean_run_has_no_report(model, optimizer):
    with OverflowGuard(model, optimizer) as guard:
        train(model, optimizer, batches(3))
    assert guard.last_report is None
    assert guard.step == 3
    assert not guard.last_step_skipped


MODULES = ["blocks.0.fc1", "blocks.1.act", "blocks.2", "norm", "head"]


@pytest.mark.parametrize("name, at, value", pairs(MODULES, (0, -1), (INF, -INF, NAN)))
def test_a_module_that_made_it_is_named(model, optimizer, name, value, at):
    module = model.get_submodule(name)
    with plant(module, value, at):
        verdict = verdict_of(model, optimizer, batches(1)[0])
    assert (verdict.origin.how, verdict.origin.maker) == ("made", name)
    first = verdict.first
    assert (first.kind, first.fqn, first.label) == ("output", name, "output")
    assert first.class_name == type(module).__name__
    is_nan = value != value
    assert (first.num_nan, first.num_inf) == (is_nan, not is_nan)
    assert first.dtype == "float32"


def test_a_module_that_passed_it_on_is_told_from_its_caller(model, optimizer, as_kept):
    model.blocks[1].factor = INF
    verdict = verdict_of(model, optimizer, batches(1)[0])
    assert verdict.first.fqn == "blocks.1.fc2"
    assert verdict.first.kind == "input"
    assert verdict.origin.how == "passed_on"
    as_kept(verdict.origin.maker)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_bad_batch_is_the_batch(model, optimizer, by_keyword):
    (x, y) = batches(1)[0]
    (y if by_keyword else x)[1] = NAN
    verdict = verdict_of(model, optimizer, (x, y))
    if by_keyword:
        assert verdict.first.label in ("input.y", "output['loss']")
    else:
        assert verdict.origin.how == "given"
        assert "batch" in verdict.origin.maker
        assert verdict.first.label == "input[0]"


def test_a_bad_weight_comes_first(model, optimizer):
    model.blocks[1].fc1.weight.data[0, 0] = INF
    verdict = verdict_of(model, optimizer, batches(1)[0])
    assert verdict.first.kind == "weight"
    assert verdict.first.fqn == "blocks.1.fc1.weight"
    assert verdict.origin.how == "given"


def test_a_bad_weight_that_no_call_uses_is_found(model, optimizer):
    model.unused = nn.Linear(2, 2)
    model.unused.bias.data[1] = NAN
    assert verdict_of(model, optimizer, batches(1)[0]).first.fqn == "unused.bias"


def test_a_bad_buffer_is_blamed_for_its_module(model, optimizer):
    model.eval()
    model.norm.running_var[2] = NAN
    verdict = verdict_of(model, optimizer, batches(1)[0])
    assert verdict.origin.how == "given"
    assert verdict.origin.maker == "its buffer norm.running_var"


def test_a_bad_buffer_alone_is_found(model, optimizer):
    model.register_buffer("table", torch.tensor([1.0, INF]))
    verdict = verdict_of(model, optimizer, batches(1)[0])
    assert (verdict.first.kind, verdict.first.fqn) == ("buffer", "table")


def test_a_bad_gradient_of_an_output_is_bracketed(model, optimizer, as_kept):
    with plant(model.blocks[1].fc1, NAN, backward=True):
        verdict = verdict_of(model, optimizer, batches(1)[0])
    first = verdict.first
    assert (first.kind, first.label) == ("grad_output", "grad_output")
    # The hook spoils what fc1's own hook is then given.
    assert first.fqn == "blocks.1.fc1"
    as_kept(verdict.origin.maker)
    assert verdict.origin.after == "blocks.1.act"
    assert "blocks.1.fc1.weight" in verdict.dirty_gradients
    assert "blocks.1.fc2.weight" in verdict.clean_gradients
    assert "blocks.1.fc2.bias" not in verdict.clean_gradients  # not the nearest


def test_the_backward_of_the_loss_is_named(model, optimizer, as_kept):
    with OverflowGuard(model, optimizer, "warn") as guard:
        out = model(*batches(1)[0])["out"]
        (out.sum() * INF).backward()
        optimizer.step()
    as_kept(guard.last_report.verdict.origin.maker)


def test_a_gradient_that_is_bad_by_itself(model, optimizer, as_kept):
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(x, y=y)["loss"].backward()
        model.head.weight.grad[0, 3] = INF
        optimizer.step()
    verdict = guard.last_report.verdict
    assert (verdict.first.kind, verdict.first.fqn) == ("gradient", "head.weight")
    assert verdict.dirty_gradients == ["head.weight"]
    assert verdict.clean_gradients == ["norm.bias", "head.bias"]
    assert verdict.origin.candidates == []
    as_kept(verdict.origin.maker)


def test_a_recorded_loss_is_seen(model, optimizer):
    with OverflowGuard(model, optimizer, "warn") as guard:
        loss = model(*batches(1)[0])["out"].mean()
        guard.record(loss=loss * INF)
        loss.backward()
        optimizer.step()
    first = guard.last_report.verdict.first
    assert (first.kind, first.label, first.num_inf) == ("recorded", "loss", 1)


def test_the_optimizers_state_is_seen_on_request(model, optimizer):
    data = batches(3)
    with OverflowGuard(
        model, optimizer, "warn", watch=("gradients", "optimizer_state")
    ) as guard:
        train_step(model, optimizer, data[0])
        optimizer.state[model.head.bias]["exp_avg_sq"][0] = INF
        train_step(model, optimizer, data[1])
    first = guard.last_report.verdict.first
    assert (first.kind, first.fqn) == ("optimizer_state", "head.bias.exp_avg_sq")


@dataclasses.dataclass
class Wrapped:
    values: list


class Nested(Assembled):
    def forward(self, x):
        out = self.inner(x)
        return self.wrap(out, out * INF if self.training else out)


@pytest.mark.parametrize(
    "wrap, label",
    [
        (lambda a, b: (a, (a, (b,))), "output[1][1][0]"),
        (lambda a, b: [a, b], "output[1]"),
        (lambda a, b: {"a": a, "b": [b]}, "output['b'][0]"),
        (lambda a, b: Wrapped([a, {"b": b}]), "output.values[1]['b']"),
        (lambda a, b: torch.return_types.max((a, b)), "output[1]"),
    ],
)
def test_outputs_in_any_nesting_are_seen(wrap, label):
    model = Nested(inner=nn.Linear(4, 4), wrap=wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(torch.ones(2, 4))
        optimizer.step()
    assert guard.last_report.verdict.first.label == label


def test_gradients_of_nested_outputs_are_seen():
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x * 2, "b": [x * 3]}

    model = nn.Sequential(nn.Linear(3, 3), Two())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        out = model(torch.ones(1, 3))
        (out["a"].sum() + out["b"][0].sum() * NAN).backward()
        optimizer.step()
    assert guard.last_report.verdict.first.label == "grad_output['b'][0]"


def test_what_it_was_before_is_told(model, optimizer):
    data = batches(2)
    with OverflowGuard(model, optimizer, "warn") as guard:
        outputs = []
        handle = model.head.register_forward_hook(lambda m, a, o: outputs.append(o))
        train_step(model, optimizer, data[0])
        handle.remove()
        with plant(model.head, INF):
            train_step(model, optimizer, data[1])
    headroom = guard.last_report.verdict.headroom
    assert headroom.where == "output of head"
    assert headroom.abs_max == outputs[0].abs().max().item()
    assert headroom.limit == torch.finfo(torch.float32).max
    assert headroom.dtype == "float32"


@pytest.mark.explains
def test_what_came_near_the_end_of_its_dtype_is_told(as_kept):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    model[0].weight.data.fill_(3e4)
    model[0].bias.data.zero_()
    with OverflowGuard(model, on_overflow="warn") as guard:
        with plant(model[1], INF):
            model(torch.ones(1, 2, dtype=torch.float16))
        report = guard.check()
    assert report.least_headroom.where == "output of 0"
    assert report.least_headroom.abs_max == 6e4
    as_kept(report.sentences())


@pytest.mark.explains
def test_a_report_reads_as_text_and_as_json(model, optimizer, as_kept):
    """The frames, and then the answer and all that it rests on."""
    with plant(model.blocks[1].fc2, INF), pytest.raises(NonFiniteError) as raised:
        with OverflowGuard(model, optimizer):
            train_step(model, optimizer, batches(1)[0])
    report = raised.value.report
    frames, _, paragraph = str(report).rpartition("\n\n")
    assert paragraph.splitlines()[0] == str(raised.value).splitlines()[0]
    as_kept(report.headline())
    assert "Non-finite gradients: " in paragraph
    assert "Non-finite gradients: " not in str(raised.value)
    assert "produced it" not in paragraph  # the replay has named the operation
    assert "What to try: " not in paragraph  # nothing is known that helps
    as_kept(frames)
    data = json.loads(report.to_json())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["verdict"]["first"]["fqn"] == "blocks.1.fc2"
    assert data["summary"].split() == paragraph.split()
    rows = report.explanation.words.rows()
    assert data["summary"].splitlines() == [*report.sentences(), *rows]


def test_the_frames_are_those_of_the_original(capsys):
    """A bad forward prints what DebugUnderflowOverflow prints."""
    batch = batches(1)[0]
    model, optimizer = make()
    with plant(model.blocks[1].fc2, INF):
        report = warned(model, optimizer, batch)
    model, optimizer = make()
    with (
        plant(model.blocks[1].fc2, INF),
        overflow_fast.DebugUnderflowOverflow(model),
        pytest.raises(ValueError),
    ):
        train_step(model, optimizer, batch)
    printed = capsys.readouterr().out
    assert str(report).rpartition("\n\n")[0] in printed


def test_the_frames_are_of_the_step_that_is_reported(model, optimizer):
    data = batches(2)
    with OverflowGuard(model, optimizer, "warn") as guard:
        train_step(model, optimizer, data[0])
        with plant(model.blocks[0].act, INF):
            train_step(model, optimizer, data[1])
    assert len(guard.last_report.frames) == 2


def test_an_in_place_module_is_not_blamed_for_sure():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", exclude=["0"]) as guard:
        with plant(model[0], INF):
            model(torch.ones(2, 4))
        optimizer.step()
    assert guard.last_report.verdict.origin.how == "unclear"


def test_a_forward_without_autograd_is_judged_when_it_ends(model, optimizer):
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "raise") as guard:
        with torch.no_grad(), plant(model.head, NAN):
            with pytest.raises(NonFiniteError, match="without autograd"):
                model(x, y=y)
        train_step(model, optimizer, (x, y))  # which is clean
    assert guard.step == 1


@pytest.mark.explains
def test_check_judges_without_an_optimizer():
    model = Net()
    x, y = batches(1)[0]
    with OverflowGuard(model, on_overflow="warn") as guard:
        model(x, y=y)["loss"].backward()
        assert guard.check() is None
        with plant(model.head, NAN):
            model(x, y=y)
        assert guard.check().verdict.first.fqn == "head"
        assert guard.check() is None


def test_what_was_discarded_is_not_judged(model, optimizer):
    data = batches(2)
    with OverflowGuard(model, optimizer) as guard:
        with plant(model.head, NAN):
            model(data[0][0], y=data[0][1])
        guard.discard()
        train_step(model, optimizer, data[1])
    assert guard.last_report is None


class Attention(nn.Module):
    def forward(self, x, mask):
        return (x + mask).softmax(-1)


@pytest.mark.explains
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_mask_is_no_alarm_and_not_blamed_in_vain(by_keyword, as_kept):
    class Model(Assembled):
        def forward(self, x, mask):
            if by_keyword:
                return self.attention(x, mask=mask)
            return self.attention(x, mask)

    model = Model(attention=Attention())
    mask = torch.tensor([[0.0, -INF], [0.0, 0.0]])
    with OverflowGuard(model, on_overflow="warn") as guard:
        model(torch.ones(2, 2), mask)
        assert guard.check() is None
        mask[0, 0] = -INF  # nothing is left to attend to
        model(torch.ones(2, 2), mask)
        report = guard.check()
    label = "input.mask" if by_keyword else "input[1]"
    assert report.verdict.origin.maker == "attention"
    assert report.verdict.masks == [label]
    as_kept([each for each in report.sentences() if label in each])


def test_names_that_never_repeat_do_not_fill_the_memory(model, optimizer):
    with OverflowGuard(model, optimizer, "warn") as guard:
        guard.record(aux=torch.ones(()))
        for i in range(3000):
            guard.record(**{f"loss_of_batch_{i}": torch.ones(())})
        train(model, optimizer, batches(1))
        names = [row.where for row in guard.headroom().rows]
        assert sum("loss_of_batch" in name for name in names) == 1000
        for name, label in (("aux", "aux"), ("loss_of_batch_9999", "loss_of_batch_*")):
            guard.record(**{name: torch.tensor(INF)})
            train(model, optimizer, batches(1))
            assert guard.last_report.verdict.first.label == label
