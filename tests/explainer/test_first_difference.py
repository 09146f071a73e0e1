"""A replay is compared with the step: the first value that differs is named."""

import pytest
import torch
from assembled import Assembled
from guarding import make
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard


def flip_once(module, place, value, on="output"):
    """Writes a value into what a module makes, in the next call alone."""
    state = {"is_due": True}

    def write(module, args, output):
        if state.pop("is_due", False):
            with torch.no_grad():
                output.view(-1)[place] = value

    def write_gradient(module, given):
        if state.pop("is_due", False):
            wrong = given[0].clone()
            wrong.view(-1)[place] = value
            return (wrong,)

    if on == "output":
        module.register_forward_hook(write, prepend=True)  # before the guard's hook
    else:
        module.register_full_backward_pre_hook(write_gradient)


def failing_step(model, optimizer, guard, x, y):
    with pytest.raises(NonFiniteError) as error:
        for _ in range(3):
            guard.run(lambda: model(x, y=y)["loss"]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return error.value.report.explanation


DATA = (torch.ones(4, 8) * torch.arange(1, 5)[:, None], torch.zeros(4, 1))


@pytest.mark.parametrize("defer", [False, True])
def test_the_first_frame_that_differs_is_named(model, optimizer, defer, as_kept):
    """A large finite value goes on through two blocks before it overflows."""
    guard = OverflowGuard(model, optimizer, _defer=defer)
    flip_once(model.blocks[0].fc1, 5, 3e38)
    found = failing_step(model, optimizer, guard, *DATA)
    assert found.cause == "not reproducible"
    assert found.module == "blocks.0.fc1"
    as_kept(found.evidence)


@pytest.mark.slow
def test_a_step_that_repeats_has_no_difference(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    with torch.no_grad():
        model.blocks[1].fc1.weight.mul_(1e30)
        model.blocks[1].fc2.weight.mul_(1e30)
    found = failing_step(model, optimizer, guard, *DATA)
    assert found.cause != "not reproducible"
    assert "differs" not in str([*found.notes, *found.evidence])


def test_a_difference_is_named_where_both_are_bad(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer)
    with torch.no_grad():
        model.head.weight.fill_(3e38)
    flip_once(model.blocks[1].fc2, 0, 77.0)
    found = failing_step(model, optimizer, guard, *DATA)
    assert found.module in ("head", "")
    notes = [note for note in found.notes if "not the same as the step" in note]
    as_kept(notes[0])


def test_a_count_that_differs(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer)
    flip_once(model.blocks[2].act, 3, float("nan"))
    found = failing_step(model, optimizer, guard, *DATA)
    assert found.module == "blocks.2.act"
    as_kept(found.evidence)


def test_a_flipped_gradient(model, optimizer):
    guard = OverflowGuard(model, optimizer)
    flip_once(model.blocks[1].fc2, 3, float("inf"), on="gradient")
    found = failing_step(model, optimizer, guard, *DATA)
    assert (found.phase, found.cause) == ("backward", "not reproducible")
    assert not any("output of" in each.split("grad_")[0] for each in found.evidence)


class Checkpointed(Assembled):
    def forward(self, x, y):
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out = self.net.head(self.net.norm(x))
        return {"loss": ((out - y) ** 2).mean()}


def test_dropout_checkpoints_and_micro_batches_repeat():
    """What differs by design of the step does not differ in its replay."""
    model, _ = make()
    model.blocks[0].act = nn.Sequential(model.blocks[0].act, nn.Dropout(0.5))
    model = Checkpointed(net=model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    OverflowGuard(model, optimizer)
    with torch.no_grad():
        model.net.head.weight.fill_(3e38)
    with pytest.raises(NonFiniteError) as error:
        for x, y in [DATA, (DATA[0] * 2, DATA[1])]:
            (model(x, y)["loss"] / 2).backward()
        optimizer.step()
    found = error.value.report.explanation
    assert found.cause == "range overflow"
    assert "differs" not in str([*found.notes, *found.evidence])


def test_the_row_is_of_one_step(model, optimizer):
    """Extremes of the steps before are no difference."""
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(NonFiniteError) as error:
        for scale in (1e3, 1e2, 1.0):
            if scale == 1.0:
                flip_once(model.blocks[0].fc1, 5, 3e38)
            loss = guard.run(
                lambda scale=scale: model(DATA[0] * scale, DATA[1])["loss"]
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert error.value.report.explanation.module == "blocks.0.fc1"


def test_an_error_of_the_comparison_costs_only_the_comparison(monkeypatch):
    from overflow_fast.guard.watching.watch import ModelWatch

    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)
    flip_once(model.blocks[0].fc1, 5, 3e38)
    attach = ModelWatch.attach
    own = set(map(id, guard._parts.watches))

    def fails(self):
        if id(self) in own:
            return attach(self)
        raise RuntimeError("no hooks today")

    monkeypatch.setattr(ModelWatch, "attach", fails)
    found = failing_step(model, optimizer, guard, *DATA)
    assert found.cause == "not reproducible"
    assert "differs" not in str(found.evidence)


def test_a_flight_record_beside_it(model, optimizer, tmp_path):
    guard = OverflowGuard(model, optimizer, record=tmp_path / "run.ofr")
    flip_once(model.blocks[0].fc1, 5, 3e38)
    assert failing_step(model, optimizer, guard, *DATA).module == "blocks.0.fc1"
