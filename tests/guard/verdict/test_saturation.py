"""Values that a dtype's end cuts off leave no inf: they are counted, and told once."""

import logging

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.monitors import Saturation, Spikes, Underflow

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


class Cast(Assembled):
    """Returns what a test asks for, and its input."""

    def forward(self, x, value):
        self.cast(value)
        return self.linear(x)


class Returned(nn.Module):
    def forward(self, value):
        return value.clone()


def messages_of(caplog, values, **options):
    """What is logged of steps in which a module returns these values."""
    model = Cast(linear=nn.Linear(2, 2), cast=Returned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        OverflowGuard(model, optimizer, explain=False, **options),
        caplog.at_level(logging.WARNING, "overflow_fast"),
    ):
        for value in values:
            model(torch.ones(1, 2), value).sum().backward()
            optimizer.step()
    return [text for text in caplog.messages if "cut values off" in text]


def end_of(dtype, num, numel=1000, sign=1.0):
    values = torch.linspace(0.01, 1, numel)
    values[:num] = sign * torch.finfo(dtype).max
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.float16], ids=str)
def test_values_at_the_end_are_told_once(dtype, caplog, as_kept):
    (text,) = messages_of(caplog, [end_of(dtype, 100)] * 5)
    limit = f"{torch.finfo(dtype).max:g}"
    as_kept(text)
    assert limit in text and str(dtype)[6:] in text


def test_a_saturating_cast(caplog, as_kept):
    value = (torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 1e6).to(
        torch.float8_e4m3fn
    )
    if value.float().isnan().any():
        pytest.skip("this torch makes a nan of it and does not saturate")
    assert not value.float().isinf().any()
    (text,) = messages_of(caplog, [value] * 2)
    as_kept(text)


def test_a_share_that_doubles_is_told_again(caplog):
    dtype = torch.float8_e4m3fn
    steps = [end_of(dtype, n) for n in (100, 100, 150, 150, 400, 400, 400, 400, 400)]
    assert len(messages_of(caplog, steps)) == 2


SILENT = {
    "scaled to its largest value": end_of(torch.float8_e4m3fn, 3),
    "a mask": end_of(torch.float16, 500, sign=-1.0),
    "a wide mask": torch.full((1000,), torch.finfo(torch.float32).min),
    "bfloat16": end_of(torch.bfloat16, 500),
    "near the end": torch.full((1000,), 65472.0).half(),
    "integers": torch.full((1000,), 127, dtype=torch.int8),
    "empty": torch.empty(0, dtype=torch.float16),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_stands_there_on_purpose_is_not_told(name, caplog):
    assert messages_of(caplog, [SILENT[name]] * 4) == []


def test_it_can_be_switched_off(caplog):
    value = end_of(torch.float8_e4m3fn, 500)
    assert messages_of(caplog, [value] * 4, monitors=[Spikes()]) == []
    assert messages_of(caplog, [value] * 4, monitors=[Saturation(share=0.6)]) == []


def test_underflow_counts_are_those_of_their_own_steps(caplog):
    model = Cast(linear=nn.Linear(2, 2), cast=Returned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, monitors=[Underflow(every=4)])
    value = end_of(torch.float8_e4m3fn, 500)
    shares = []
    with guard:
        for _ in range(3):
            model(torch.ones(1, 2), value).sum().backward()
            optimizer.step()
            shares.append(guard.metrics()["activation_zeros"])
    assert len(set(shares)) == 1
