"""The program's own line is shown, where the loss was not replayed."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer import views
from overflow_fast.explainer.replay_check import UncertainError


@pytest.fixture(autouse=True)
def _lines_are_uncertain(monkeypatch):
    def refuse(*args):
        raise UncertainError("the lines are not certain")

    monkeypatch.setattr(views, "LossCall", refuse)


class Training:
    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def plain(self, x):
        loss = torch.log(self.model(x) * 0).mean()
        loss.backward()
        self.optimizer.step()

    def scaled(self, x):
        for _ in range(2):
            total = torch.log(self.model(x) * 0).mean()
            total = total / 4
            (total).backward()
        self.optimizer.step()

    def with_output(self, x):
        output = self.model(x)
        loss = torch.log(output * 0).mean()
        loss.backward()
        self.optimizer.step()

    def in_two_functions(self, x):
        loss = torch.log(self.model(x) * 0).mean()
        loss.backward()
        self.step()

    def step(self):
        self.optimizer.step()

    def of_a_tuple(self, x):
        loss, _ = torch.log(self.model(x) * 0).mean(), 1
        loss.backward()
        self.optimizer.step()

    def of_a_branch(self, x, is_first=True):
        if is_first:
            loss = torch.log(self.model(x) * 0).mean()
        else:
            loss = torch.log(self.model(x) * 0).sum()
        loss.backward()
        self.optimizer.step()

    def of_a_branch_later(self, x, is_first=False):
        loss = torch.log(self.model(x) * 0).mean()
        if is_first:
            loss = torch.log(self.model(x) * 0).sum()
        loss.backward()
        self.optimizer.step()

    def under_a_context(self, x):
        with torch.autocast("cpu", enabled=False):
            loss = torch.log(self.model(x) * 0).mean()
        loss.backward()
        self.optimizer.step()

    def of_the_turn_before(self, x):
        loss = torch.log(self.model(x) * 0).mean()
        for _ in range(2):
            loss.backward()
            self.optimizer.step()
            loss = torch.log(self.model(x) * 0).sum()

    def of_a_function_that_may_never_run(self, x):
        def other():
            loss = torch.log(self.model(x) * 0).sum()
            loss.backward()

        self.without_a_name(x)

    def summed(self, x):
        total = 0
        for part in x.split(1):
            total = total + torch.log(self.model(part) * 0).mean()
        total.backward()
        self.optimizer.step()

    def summed_in_a_tensor(self, x):
        total = torch.zeros(())
        for part in x.split(1):
            total = total + torch.log(self.model(part) * 0).mean()
        total.backward()
        self.optimizer.step()

    def without_a_name(self, x):
        torch.log(self.model(x) * 0).mean().backward()
        self.optimizer.step()

    def of_a_method(self, x):
        loss = self.loss_of(x)
        loss.backward()
        self.optimizer.step()

    def loss_of(self, x):
        return torch.log(self.model(x) * 0).mean()

    def of_a_function(self, x):
        def compute_loss(x):
            return torch.log(model(x) * 0).mean()

        model = self.model
        loss = compute_loss(x)
        loss.backward()
        self.optimizer.step()

    def of_a_method_that_is_given_the_output(self, x):
        output = self.model(x)
        loss = self.with_a_penalty(output)
        loss.backward()
        self.optimizer.step()

    def with_a_penalty(self, output):
        return torch.log(output * 0).mean() + self.model.weight.norm()


CODE = "torch.log(self.model(x) * 0).mean()"
SAID = {
    "plain": f"Write it as `loss = guard.run(lambda: {CODE})` (test_loss_line.py:29).",
    "scaled": (
        f"Write it as `total = guard.run(lambda: {CODE})` (test_loss_line.py:35)."
    ),
    "with_output": (
        "The loss is computed at test_loss_line.py:42: `loss = torch.log(output * "
        "0).mean()`. Call the model and that line in one function, and that by `loss = "
        "guard.run(function)`."
    ),
    "in_two_functions": (
        f"Write it as `loss = guard.run(lambda: {CODE})` (test_loss_line.py:47)."
    ),
    "under_a_context": (
        f"Write it as `loss = guard.run(lambda: {CODE})` (test_loss_line.py:76)."
    ),
    "of_a_method": (
        "Write it as `loss = guard.run(lambda: self.loss_of(x))` "
        "(test_loss_line.py:113)."
    ),
    "of_a_function": (
        "Write it as `loss = guard.run(lambda: compute_loss(x))` "
        "(test_loss_line.py:125)."
    ),
    "of_a_method_that_is_given_the_output": (
        "The loss is computed at test_loss_line.py:131: `loss = "
        "self.with_a_penalty(output)`. Call the model and that line in one function, "
        "and that by `loss = guard.run(function)`."
    ),
}
NONE_IS_KNOWN = [
    *("of_a_tuple", "without_a_name"),
    *("of_a_branch", "of_a_branch_later", "of_the_turn_before"),
    *("of_a_function_that_may_never_run", "summed", "summed_in_a_tensor"),
]


def notes_of(way):
    training = Training()
    guard = OverflowGuard(training.model, training.optimizer, explain=True)
    try:
        with pytest.raises(NonFiniteError) as caught:
            getattr(training, way)(torch.ones(3, 2))
    finally:
        guard.remove()
    return " ".join(caught.value.report.explanation.notes)


@pytest.mark.parametrize("way", SAID)
def test_the_line_of_the_loss(way):
    assert notes_of(way).endswith(SAID[way])


@pytest.mark.parametrize("way", NONE_IS_KNOWN)
def test_no_line_is_guessed(way):
    text = notes_of(way)
    assert "guard.run(lambda: loss)" in text and "Write it as" not in text
    assert "computed at" not in text


def a_rank():
    training = Training()
    training.model = DistributedDataParallel(training.model)
    guard = OverflowGuard(training.model, training.optimizer, "skip")
    x = torch.ones(3, 2)
    x[0, 0] = float("nan") if dist.get_rank() == 1 else 1.0
    training.with_output(x)
    notes = " ".join(guard.last_report.explanation.notes)
    guard.remove()
    return notes


@pytest.mark.slow
def test_ranks_show_the_line_once():
    notes = on_ranks(2, a_rank)
    assert [each.count("computed at") for each in notes] == [1, 1]
    assert notes[0] == notes[1]


def test_code_without_a_source_is_no_matter():
    space = {"training": Training(), "torch": torch, "x": torch.ones(3, 2)}
    lines = "loss = torch.log(training.model(x) * 0).mean()\nloss.backward()\n"
    training = space["training"]
    with OverflowGuard(training.model, training.optimizer, explain=True):
        with pytest.raises(NonFiniteError) as caught:
            exec(compile(f"{lines}training.optimizer.step()", "<cell>", "exec"), space)
    assert "guard.run(lambda: loss)" in str(caught.value.report.explanation)
