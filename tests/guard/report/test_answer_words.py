"""The words of an answer: who produced the value, and what to do about it."""

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.op import Op
from overflow_fast.guard.report.remedy import Remedy

pytestmark = pytest.mark.explains


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def raised(function):
    with pytest.raises(NonFiniteError) as error:
        function()
    return error.value


class Gated(Assembled):
    """A layer between whose submodules a value overflows, and one that reads it."""

    def forward(self, x):
        return self.down(self.up(x).abs() / 0)


def test_the_reader_and_the_code_that_produced_it_are_told_apart(as_kept):
    model = nn.Sequential(
        nn.Linear(3, 3), Gated(up=nn.Linear(3, 3), down=nn.Linear(3, 3))
    )
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer, explain=False)
    model(torch.ones(2, 3)).mean().backward()
    as_kept(raised(optimizer.step))
    guard.remove()


def test_infinities_of_both_signs_are_counted_together(as_kept):
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer, explain=False)
    model(torch.ones(2, 2)).mean().backward()
    model.weight.grad[0] = torch.tensor([float("inf"), -float("inf")])
    as_kept(raised(optimizer.step))
    guard.remove()


def test_a_loss_that_was_not_replayed_is_named_instead_of_all_who_read_the_output(
    as_kept,
):
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 1), nn.Sigmoid())
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    batches = iter([torch.ones(4, 2), torch.zeros(4, 2)])  # cannot be asked again
    first, second = model(next(batches)), model(next(batches))
    loss = (first - first.detach()).sqrt().mean() + second.mean()
    loss.backward()
    as_kept(raised(optimizer.step))
    guard.remove()


def test_a_row_of_scores_that_is_minus_inf_throughout_is_named(as_kept):
    model = nn.Linear(4, 4)
    hidden = torch.zeros(3, 4, dtype=torch.bool)
    hidden[1] = True

    def loss_of(x):
        return model(x).masked_fill(hidden, -torch.inf).softmax(-1).mean()

    found = explain(model, torch.ones(3, 4), loss_of)
    as_kept(found.evidence[0])
    hidden[1, 0] = False
    assert explain(model, torch.ones(3, 4), loss_of).is_finite


@pytest.mark.parametrize(
    ("value", "told"), [(65532.0, "65530"), (65520.0, "65520"), (175000.0, "175000")]
)
def test_a_number_beyond_a_maximum_is_not_rounded_to_below_it(value, told):
    positions = torch.tensor([value])

    class Rotary(Assembled):
        def forward(self, x):
            return x * positions.to(x.dtype)

    with torch.inference_mode():
        found = explain(Rotary(lin=nn.Linear(1, 1)), torch.ones(1).half())
    assert f"({told} in float64; its maximum is 65504)" in str(found)


def test_a_run_that_diverges_is_answered_with_the_step_that_did_it_and_what_to_do(
    as_kept,
):
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    for size in (1.0, 1.0, 3e4):
        optimizer.zero_grad()
        guard.run(lambda: model(torch.full((2, 4), size)).pow(2).mean()).backward()  # noqa: B023
        optimizer.step()
    optimizer.zero_grad()
    loss = guard.run(lambda: model(torch.ones(2, 4)).abs().exp().mean())
    loss.backward()
    as_kept(raised(optimizer.step))
    guard.remove()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x, w: (1 / (x * 1e-6) + w).mean(),
        lambda x, w: ((x * 1e-6).reciprocal() + w).mean(),
    ],
)
def test_a_quotient_beyond_float16_is_computed_in_float32(loss_of):
    model = nn.Linear(1, 1).half()
    x = torch.ones(4, 1, dtype=torch.float16)
    found = explain(model, x, lambda x: loss_of(x, model.weight))
    assert found.cause == "range overflow"
    texts = [each.text for each in found.remedies if each.is_recommended]
    assert any(e.startswith("compute `") and e.endswith("` in float32") for e in texts)
    # 1e6 is true: what float16 holds comes nowhere near it.
    held = [each for each in found.remedies if each.is_finite and each.error is None]
    assert held and not any(each.is_recommended for each in held)


def test_a_divisor_that_is_too_small_is_made_larger(as_kept):
    weight = nn.Linear(1, 1)
    x = torch.tensor([[1.0], [1e-39]])

    def loss_of(x):
        return (weight.weight / x).mean()

    found = explain(weight, x, loss_of)
    as_kept(found.nearest.text)  # for 1e39 is beyond float32
    assert "x.abs().clamp(min=" in found.nearest.code


def test_an_operation_that_a_replay_has_found_is_not_laid_at_the_batch_as_well(as_kept):
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    guard.run(lambda: model((x - x) / (x - x)).mean()).backward()
    as_kept(raised(optimizer.step))
    guard.remove()


def test_evidence_counts_infs_by_their_sign(as_kept):
    model, x = nn.Linear(3, 1), torch.ones(4, 3)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer)
    guard.run(lambda: (model(x) * 0).relu().log().mean()).backward()
    as_kept(raised(optimizer.step))
    optimizer.zero_grad()
    x[0, 0], x[1, 1], x[2, 2] = torch.inf, -torch.inf, torch.nan
    guard.run(lambda: model(x).mean()).backward()
    as_kept(raised(optimizer.step))
    guard.remove()


def test_what_the_loop_has_computed_is_not_called_the_batch(as_kept):
    """A target of a teacher, in a loop that keeps its gradients for two batches."""
    model, teacher = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer) as guard:
        for scale in (1.0, 0.0):
            with torch.no_grad():
                target = teacher(torch.ones(4, 3)) / scale / scale * scale
            guard.run(lambda y=target: (model(torch.ones(4, 3)) * y).mean()).backward()
        as_kept(raised(optimizer.step))


def test_an_input_of_a_later_forward_says_that_the_loop_has_called_the_model(as_kept):
    model, x = nn.Sequential(nn.Linear(3, 1)), torch.ones(4, 3)
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer) as guard:
        guard.run(lambda: model(torch.ones(4, 3)).mean()).backward()
        x[1, 1] = torch.nan
        guard.run(lambda: model(x).mean()).backward()
        as_kept(raised(optimizer.step))


def test_a_value_far_from_an_overflow_is_not_said_to_be_near_one(as_kept):
    model = nn.Linear(3, 1)
    optimizer = sgd(model)
    guard = OverflowGuard(model, optimizer, explain=False)
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    model(torch.ones(2, 3)).mean().backward()
    said = " ".join(raised(optimizer.step).report.sentences())
    as_kept(said)
    assert "-fold" not in said.split("When it was last seen finite")[1].split(". ")[0]
    guard.remove()


class Made(Assembled):
    """Returns what a function makes of its layer's output."""

    def forward(self, x):
        return self.function(self.linear(x).relu())


@pytest.mark.parametrize("is_mask", [True, False])
def test_a_quotient_of_minus_infinity_is_no_mask_that_may_be_meant(is_mask):
    model = Made(
        linear=nn.Linear(2, 2), function=torch.log if is_mask else lambda x: (x - 1) / x
    )
    nn.init.constant_(model.linear.bias, -9.0)
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer):
        model(torch.ones(2, 2)).mean().backward()
        text = str(raised(optimizer.step))
    assert ("allow=" in text) == is_mask


def test_a_whole_explanation_leaves_no_sentence_out():
    evidence, notes = ([f"{what} {i}" for i in range(9)] for what in ("seen", "Open:"))
    told = [
        Remedy("that helps", "x = x + 1", is_finite=True),
        Remedy("that raised", tried=False, why="the replay raised ValueError"),
    ]
    op = Op("aten.log")
    found = Explanation("forward", "undefined", op=op, evidence=evidence, notes=notes)
    found.remedies = told
    text = str(found)
    assert all(each in text for each in [*evidence, *notes])
    assert "not tried that raised: the replay raised ValueError" in text


def test_a_call_that_is_written_over_several_lines_is_named_by_its_operation():
    # fmt: off
    found = explain(nn.Linear(2, 1), torch.full((3, 2), 1e4), lambda y: torch.exp(
        y.square() + 1e3
    ).sum())
    # fmt: on
    assert found.cause == "range overflow", found
    assert "`torch.exp(`" not in str(found) and "exp at " in str(found).splitlines()[0]
