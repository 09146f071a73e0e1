"""What made an update differ: settings of optimizers, gradients that were not cleared,
and rounding that an optimizer divides by a gradient's size."""

import pytest
import torch
from assembled import Assembled
from torch import nn

import overflow_fast


class Attention(Assembled):
    """The gradient of the keys' part of its fused bias is rounding alone."""

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=not self._is_fused)[0])


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def attention(is_fused):
    torch.manual_seed(0)
    return Attention(
        attention=nn.MultiheadAttention(16, 2, batch_first=True),
        out=nn.Linear(16, 4),
        _is_fused=is_fused,
    )


def adamw(model, **options):
    return [torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})]


def sgd(model, **options):
    return [torch.optim.SGD(model.parameters(), **{"lr": 1e-2, **options})]


def clear(optimizers, step):
    for each in optimizers:
        each.zero_grad()


def train(folder, model, make, num=3, clears=clear, after=lambda *_: None):
    optimizers = make(model)
    with overflow_fast.recording(folder, model) as run:
        for step in range(num):
            if step:
                run.step()
            x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean()
            clears(optimizers, step)
            loss.backward()
            for each in optimizers:
                each.step()
            after(model, optimizers, step)


@pytest.fixture
def compared(tmp_path):
    def compare(mine, its):
        train(tmp_path / "a", **mine)
        train(tmp_path / "b", **its)
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


def two_groups(rate):
    return lambda model: [
        torch.optim.SGD(
            [
                {"params": model[0].parameters()},
                {"params": model[2].parameters(), "lr": rate},
            ],
            lr=1e-2,
        )
    ]


def two_optimizers(rate):
    return lambda model: [
        torch.optim.SGD(model[0].parameters(), lr=1e-2),
        torch.optim.AdamW(model[2].parameters(), lr=rate),
    ]


def made(make, **options):
    return lambda model: make(model, **options)


def plain_adam(model):
    return [torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.01)]


SETTINGS = {
    "lr": (made(adamw, lr=2e-2), adamw, "The optimizer: lr is 0.02, against 0.01"),
    "a tensor": (
        made(sgd, lr=torch.tensor(0.5)),
        *(made(sgd, lr=0.25), "The optimizer: lr is 0.5, against 0.25"),
    ),
    "betas": (
        made(adamw, betas=(0.9, 0.9)),
        *(adamw, "The optimizer: betas is (0.9, 0.9), against (0.9, 0.999)"),
    ),
    "momentum": (made(sgd, momentum=0.5), sgd, "momentum is 0.5, against 0"),
    "class": (plain_adam, adamw, "class is 'Adam', against 'AdamW'"),
    "group": (
        two_groups(0.5),
        *(two_groups(0.25), "The optimizer, group 2: lr is 0.5, against 0.25"),
    ),
    "second": (
        two_optimizers(0.5),
        *(two_optimizers(0.25), "The optimizer 2: lr is 0.5, against 0.25"),
    ),
    "left out": (
        lambda model: [torch.optim.SGD(model[0].parameters(), lr=1e-2)],
        *(sgd, "parameters left out is 2, against 0"),
    ),
}


@pytest.mark.parametrize("case", SETTINGS.values(), ids=SETTINGS)
def test_the_setting_of_an_optimizer_is_the_answer(compared, case):
    mine, its, text = case
    diff = compared({"model": linear(), "make": mine}, {"model": linear(), "make": its})
    assert diff.first.kind == "update", diff
    assert text in str(diff.first)
    assert "makes it" not in str(diff.first)
    assert any(text.partition(": ")[2] in each for each in diff.said)


def test_equal_settings_are_said_to_be(compared, as_kept):
    def after(model, optimizers, step):
        optimizers[0].state.clear()

    mine = {"model": linear(), "make": made(sgd, momentum=0.9), "after": after}
    diff = compared(mine, {**mine, "model": linear(), "after": lambda *_: None})
    assert (diff.first.kind, diff.first.row.step) == ("update", 2), diff
    as_kept(diff.first)


def test_a_schedule_is_one_difference(compared, as_kept):
    def schedule(factor):
        def after(model, optimizers, step):
            optimizers[0].param_groups[0]["lr"] *= factor

        return after

    mine = {"model": linear(), "make": made(sgd, lr=0.5), "num": 6}
    diff = compared(
        {**mine, "after": schedule(0.5)},
        {**mine, "model": linear(), "after": schedule(0.25)},
    )
    said = [each for each in diff.said if "lr is" in each]
    as_kept(said)
    assert diff.first.row.step == 2


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_weights_behind_rounding_that_adam_divides_are_not_judged(
    compared, options, as_kept
):
    mine = {"model": attention(True), "make": made(adamw, **options)}
    diff = compared(mine, {"model": attention(False), "make": adamw})
    assert diff.first is None, diff
    (said,) = [each for each in diff.said if "not judged" in each]
    as_kept(said)


def writes(model, optimizers, step):
    with torch.no_grad():
        model.out.weight += 1e-3


ROUNDED = {
    "a rate": ({"make": made(adamw, lr=1.2e-2)}, adamw, "lr is 0.012"),
    "a linear update": ({"after": writes}, sgd, "other code that writes to weights"),
}


@pytest.mark.parametrize("case", ROUNDED.values(), ids=ROUNDED)
def test_an_update_is_named_behind_gradients_that_differ_by_rounding(compared, case):
    change, make, text = case
    mine = {"model": attention(True), "make": make, **change}
    diff = compared(mine, {"model": attention(False), "make": make})
    assert diff.first.kind == "update", diff
    assert text in str(diff.first)


@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_that_one_run_does_not_clear(compared, is_first, as_kept):
    runs = [
        {"model": linear(), "make": sgd, "clears": lambda *_: None},
        {"model": linear(), "make": sgd},
    ]
    diff = compared(*(runs if is_first else runs[::-1]))
    assert "a gradient from before" in str(diff.first), diff
    as_kept(diff.first)
