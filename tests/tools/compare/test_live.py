"""Two models side by side, such as one and its copy in float32."""

import copy

import pytest
import torch
from compared_models import batch, tower
from containers import CONTAINERS, FEW, Model

import overflow_fast


def test_equal_models_are_equal():
    diff = overflow_fast.compare_live(tower(), tower(), batch(), backward=True)
    assert diff.first is None and diff.said == []
    assert diff.counts()["equal"] == len(diff.rows) > 100
    assert {row.place.role for row in diff.rows} >= {
        *("parameter", "input", "output", "output_gradient", "parameter_gradient")
    }


def test_the_layer_and_the_operation_are_named():
    model = tower()
    model.blocks[1].attention.temperature = 2.0
    diff = overflow_fast.compare_live(model, tower(), batch())
    assert diff.first.module == "blocks.1.attention"
    assert "aten.div.Tensor at " in diff.first.op
    assert "scores / self.temperature" in diff.first.op


def test_a_wrong_backward_is_named():
    model = tower()
    model.blocks[1].up.weight.register_hook(lambda gradient: gradient * 1.1)
    diff = overflow_fast.compare_live(model, tower(), batch(), backward=True)
    assert (diff.first.module, diff.first.kind) == ("blocks.1.up", "backward")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batches_are_cast_and_rounding_is_explained(dtype):
    model = tower()
    half = copy.deepcopy(model).to(dtype)
    diff = overflow_fast.compare_live(half, model, batch().to(dtype), backward=True)
    assert diff.first is None, diff
    assert any(row.verdict == "rounding" for row in diff.rows)


def test_random_numbers_are_the_same_on_both_sides():
    model = tower(dropout=0.5)
    before = torch.get_rng_state()
    diff = overflow_fast.compare_live(model, copy.deepcopy(model), batch())
    assert diff.first is None
    assert torch.equal(torch.get_rng_state(), before)


def test_models_are_left_as_they_were():
    models = tower(), tower(1)
    models[0].head.weight.grad = torch.ones(4, 32)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    overflow_fast.compare_live(*models, batch(), backward=True)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())
        assert not any(m._forward_hooks for m in model.modules())
    assert models[0].head.weight.grad.sum() == 128
    assert models[1].head.weight.grad is None


def test_other_structures_are_compared_as_far_as_they_are_alike(as_kept):
    diff = overflow_fast.compare_live(tower(num_blocks=2), tower(num_blocks=4), batch())
    as_kept(diff.said)
    assert diff.num_compared > 40


def test_a_model_with_itself():
    model = tower()
    diff = overflow_fast.compare_live(model, model, batch(), backward=True)
    assert diff.first is None and diff.num_compared > 100


def test_what_a_model_raises_is_raised():
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        overflow_fast.compare_live(tower(), tower(), torch.ones(2, 3))


def test_a_loss_is_needed_for_gradients(as_kept):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError) as raised:
        overflow_fast.compare_live(model, model, torch.ones(1, 2), backward=True)
    as_kept(raised.value)

    def loss(model, x):
        return model(x).sum()

    options = {"backward": True, "loss": loss}
    assert overflow_fast.compare_live(model, model, torch.ones(1, 2), **options).rows


class Cancels(torch.nn.Module):
    """Loses most of its bits in half precision."""

    def forward(self, x):
        return (x + 1000) - 1000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_layer_that_loses_bits_in_half_precision_is_named(dtype):
    def compared(model):
        pair = model, copy.deepcopy(model).float()
        return overflow_fast.compare_live(*pair, batch().to(dtype), backward=True)

    model = tower().to(dtype)
    assert compared(model).first is None
    model.blocks[1].act = Cancels()
    diff = compared(model)
    assert diff.first.module == "blocks.1.act"
    assert diff.first.row.relative > 0.05 and "x + 1000" in diff.first.op


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_stays_whole_and_its_ends_are_compared(tmp_path, as_kept):
    model = tower(num_blocks=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(batch()).backward()
    for name, each in (("compiled", compiled), ("eager", model)):
        model.zero_grad()
        with overflow_fast.recording(tmp_path / name, each):
            each(batch()).backward()
    diff = overflow_fast.compare(tmp_path / "compiled", tmp_path / "eager")
    assert diff.first is None, diff
    names = {str(row.place) for row in diff.rows}
    assert {"the model: output", "head.weight: parameter gradient"} <= names
    as_kept(diff.said)


@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_are_compared_block_by_block():
    model, other = tower(num_blocks=2), tower(num_blocks=2)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    diff = overflow_fast.compare_live(model, other, batch(), backward=True)
    assert diff.first is None, diff
    names = {str(row.place) for row in diff.rows}
    assert {"blocks.1: output", "blocks.1: output gradient"} <= names


@pytest.mark.parametrize("kind", FEW)
def test_models_are_compared_in_the_module_that_differs(kind):
    model, reference = Model(kind), Model(kind, scale=2.0)
    reference.load_state_dict(model.state_dict())
    found = overflow_fast.compare_live(model, reference, torch.randn(3, 4))
    assert (found.first.module, found.first.kind) == ("block", "forward")
    assert "aten.mul" in found.first.op
    names = [row.name for row in found.rows]
    assert f"block: output{CONTAINERS[kind].path}" in names
    assert f"block: input[0]{CONTAINERS[kind].path}" in names
