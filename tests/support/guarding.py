"""A small model in which a fault can be planted, and the loops that guards watch."""

import copy

import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.detector.hooks import move_hook_to_front

INF, NAN = float("inf"), float("nan")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(2 * width, width)
        self.factor = 1.0

    def forward(self, x):
        return x + self.fc2(self.act(self.fc1(x)) * self.factor)


class Net(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x, y=None):
        for block in self.blocks:
            x = block(x)
        out = self.head(self.norm(x))
        return {"loss": ((out - y) ** 2).mean(), "out": out}


def make(seed=0, **arguments):
    torch.manual_seed(seed)
    model = Net(**arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count, width=8, seed=1):
    torch.manual_seed(seed)
    return [(torch.randn(4, width), torch.randn(4, 1)) for _ in range(count)]


def train_step(model, optimizer, batch):
    loss = model(batch[0], y=batch[1])["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def train(model, optimizer, data):
    return [train_step(model, optimizer, batch) for batch in data]


def three_steps(metrics, after_step=lambda i: None):
    """The guard of three steps, the second of which is bad, with an exporter."""
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip", metrics=metrics) as guard:
        for i, batch in enumerate(batches(3)):
            with plant(model.head, NAN) if i == 1 else torch.enable_grad():
                train_step(model, optimizer, batch)
            after_step(i)
    return guard


def state_of(model, optimizer=None):
    """Everything that a step may change, copied."""
    state = {"model": copy.deepcopy(model.state_dict())}
    if optimizer is not None:
        state["optimizer"] = copy.deepcopy(optimizer.state_dict())
    return state


def assert_same(a, b):
    """Equal in every bit, nans included."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (
            a.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(b.contiguous().view(-1).view(torch.uint8))
        )
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


class plant:
    """Makes a module's output, or the gradient of it, bad while it is entered."""

    def __init__(self, module, value=INF, at=0, backward=False):
        self.module, self.value, self.at = module, value, at
        self.backward = backward

    def _spoil(self, tensor):
        spoiled = tensor.clone()
        spoiled.view(-1)[self.at].fill_(self.value)
        return spoiled

    def _hook(self, module, args, output):
        if not self.backward:
            return self._spoil(output)
        output.register_hook(self._spoil)
        return None

    def __enter__(self):
        self.handle = self.module.register_forward_hook(self._hook)
        move_hook_to_front(self.module._forward_hooks, self.handle.id)
        return self

    def __exit__(self, *exception):
        self.handle.remove()


def flat(text):
    """A report's text, or what is logged of it, in one line."""
    return " ".join(str(text).replace("[overflow_fast]", "").split())


def hooks_of(model, optimizer=None):
    """The number of hooks, of any kind."""
    count = sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + len(module._backward_hooks)
        for module in model.modules()
    )
    for parameter in model.parameters():
        count += len(parameter._backward_hooks or ())
        count += len(parameter._post_accumulate_grad_hooks or ())
    if optimizer is not None:
        count += len(optimizer._optimizer_step_pre_hooks)
        count += len(optimizer._optimizer_step_post_hooks)
    return count


def warned(model, optimizer, batch, **arguments):
    """The report of one step under a guard that only warns."""
    with OverflowGuard(model, optimizer, "warn", **arguments) as guard:
        train_step(model, optimizer, batch)
    return guard.last_report


def report_from(call):
    """The report of the error that a call raises at a non-finite value."""
    with pytest.raises(NonFiniteError) as raised:
        call()
    return raised.value.report
