"""No checkpoint holds a nan or an inf, and the last good one stays."""

import copy
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from guarding import INF, NAN, batches, make, train, train_step
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, assert_finite_state
from overflow_fast.guard.optimizers import innermost


def trained():
    model, optimizer = make()
    train(model, optimizer, batches(2))
    return model, optimizer


def spoil_weight(model, optimizer):
    model.blocks[1].fc1.weight.data[2, 3] = NAN


def spoil_buffer(model, optimizer):
    model.norm.running_mean[0] = INF


def spoil_state(model, optimizer):
    innermost(optimizer).state[model.head.bias]["exp_avg"][0] = -INF


SPOILED = {
    "weight `blocks.1.fc1.weight` holds 1 nan": spoil_weight,
    "buffer `norm.running_mean` holds 1 inf": spoil_buffer,
    "optimizer state `head.bias.exp_avg` holds 1 inf": spoil_state,
}


@pytest.mark.parametrize("message, spoil", SPOILED.items(), ids=SPOILED)
@pytest.mark.parametrize("by_guard", [False, True])
def test_what_is_not_finite_is_named(message, spoil, by_guard):
    model, optimizer = trained()
    guard = OverflowGuard(model, optimizer, watch=["gradients"])
    arguments = () if by_guard else (model, optimizer)
    check = guard.assert_finite_state if by_guard else assert_finite_state
    check(*arguments)
    spoil(model, optimizer)
    with pytest.raises(NonFiniteError, match=message) as caught:
        check(*arguments)
    assert caught.value.report.step == 0
    assert "This is nothing to be saved." in str(caught.value)
    assert not guard.coverage().steps_watched


def test_all_that_is_not_finite_is_named():
    model, optimizer = trained()
    for spoil in SPOILED.values():
        spoil(model, optimizer)
    with pytest.raises(NonFiniteError) as caught:
        assert_finite_state(model, optimizer)
    assert (
        "Not finite in all: weight blocks.1.fc1.weight, buffer norm.running_mean, "
        "optimizer state head.bias.exp_avg."
    ) in str(caught.value)


def test_several_models_and_optimizers_are_looked_at():
    pairs = [trained(), trained()]
    models = {"a": pairs[0][0], "b": pairs[1][0]}
    optimizers = [optimizer for _, optimizer in pairs]
    assert_finite_state(models, optimizers)
    spoil_state(*pairs[1])
    with pytest.raises(NonFiniteError, match=r"b\.head\.bias\.exp_avg"):
        assert_finite_state(models, optimizers)


def test_other_models_than_the_guards_can_be_asked_for():
    model, optimizer = trained()
    average = copy.deepcopy(model)
    guard = OverflowGuard(model, optimizer)
    average.head.weight.data[0] = NAN
    guard.assert_finite_state()
    with pytest.raises(NonFiniteError, match=r"weight `head\.weight`"):
        guard.assert_finite_state(average)


def test_masks_and_what_is_allowed_are_fine():
    model, optimizer = trained()
    model.register_buffer("mask", torch.tensor([-INF, 0.0]))
    assert_finite_state(model, optimizer)
    spoil_buffer(model, optimizer)
    allow = {"norm:buffer.running_mean": "inf"}
    assert_finite_state(model, optimizer, allow=allow)
    OverflowGuard(model, optimizer, allow=allow).assert_finite_state()
    with pytest.raises(ValueError, match="allow must have keys"):
        assert_finite_state(model, allow={"norm": "inf"})


def test_asking_changes_nothing():
    model, optimizer = trained()
    with OverflowGuard(model, optimizer) as guard:
        model(torch.randn(4, 8), y=torch.randn(4, 1))["loss"].backward()
        listed = guard.coverage().tensors_listed
        guard.assert_finite_state()
        assert guard.coverage().tensors_listed == listed
        optimizer.step()
        assert guard.step == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), "model must be a torch.nn.Module"),
        ((nn.Linear(1, 1), 3), "optimizer must be a torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(TypeError, match=message):
        assert_finite_state(*arguments)
    with pytest.raises(TypeError, match=message):
        OverflowGuard(nn.Linear(1, 1)).assert_finite_state(*arguments)


def test_a_sparse_state_is_looked_at():
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert_finite_state(model, optimizer)


# Accelerate.


def accelerated(tmp_path, **options):
    from overflow_fast.integrations.accelerate import guard_with

    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model, optimizer = accelerator.prepare(*make())
    guard = guard_with(accelerator, model, optimizer, **options)
    return accelerator, model, optimizer, guard


def test_accelerate_keeps_the_last_good_checkpoint(tmp_path):
    accelerator, model, optimizer, guard = accelerated(tmp_path)
    train_step(model, optimizer, batches(1)[0])
    accelerator.save_state()
    folder = tmp_path / "checkpoints"
    before = sorted(path.name for path in folder.rglob("*"))
    spoil_weight(model, optimizer)
    with pytest.raises(NonFiniteError, match=r"blocks\.1\.fc1\.weight"):
        accelerator.save_state()
    assert sorted(path.name for path in folder.rglob("*")) == before
    guard.remove()
    accelerator.save_state()  # what nobody guards is saved


def test_accelerate_is_guarded_as_usual(tmp_path):
    accelerator, model, optimizer, guard = accelerated(tmp_path, on_overflow="skip")
    x, y = batches(1)[0]
    accelerator.backward(model(x * INF, y=y)["loss"])
    optimizer.step()
    assert guard.num_skipped == 1
    assert optimizer.step_was_skipped


def test_wrong_set_ups_of_accelerate_are_told(tmp_path, monkeypatch):
    from overflow_fast.integrations.accelerate import guard_with

    with pytest.raises(
        TypeError, match=r"accelerator must be an accelerate\.Acc.* got N"
    ):
        guard_with(None, *make())
    name = "overflow_fast.integrations.accelerate"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match="needs accelerate: run `pip install acc"):
        __import__(name)
