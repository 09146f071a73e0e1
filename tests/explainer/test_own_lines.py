"""Losses outside of the models are explained without `guard.run()`."""

import contextlib
import gc
import random
import runpy
import weakref

import pytest
import torch
import torch.nn.functional as F
from processes import python
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report import notes
from overflow_fast.options import Explain

pytestmark = pytest.mark.usefixtures("untried")

NOTE = "were run again, too"


class Training:
    """A model whose first output is far below the others, and labels of that class."""

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Linear(2, 3)
        self.model.weight.data.zero_()
        self.model.bias.data.copy_(torch.tensor([-300.0, 0.0, 1.0]))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.labels = torch.zeros(4, dtype=torch.long)
        self.guard = OverflowGuard(self.model, self.optimizer, **options)
        self.num_called = 0

    def negative_logarithm(self, outputs):
        return F.nll_loss(outputs.softmax(-1).log(), self.labels)


X = torch.ones(4, 2)


def in_a_line(t, x):
    loss = t.negative_logarithm(t.model(x))
    loss.backward()
    t.optimizer.step()


def in_lines(t, x):
    outputs = t.model(x)
    t.num_called += 1
    probabilities = outputs.softmax(-1)
    logs = probabilities.log()
    accuracy = (outputs.argmax(1) == t.labels).float().mean()
    loss = F.nll_loss(logs, t.labels)
    loss.backward()
    t.optimizer.step()
    return accuracy


def under_contexts(t, x):
    with torch.autocast("cpu", enabled=False):
        outputs = t.model(x)
    with contextlib.nullcontext():
        loss = t.negative_logarithm(outputs)
    loss.backward()
    t.optimizer.step()


def added_up(t, x):
    outputs = t.model(x)
    losses = []
    for part in outputs.split(2):
        losses.append(-part.softmax(-1).log()[:, 0].mean())
    total = 0.0
    for each in losses:
        total = total + each
    total /= len(losses)
    total.backward()
    t.optimizer.step()


def of_a_tuple(t, x):
    outputs, scale = t.model(x), 1.0
    loss = t.negative_logarithm(outputs)
    loss = loss * scale
    loss.backward()
    t.optimizer.step()


def in_a_branch(t, x):
    outputs = t.model(x)
    if x is not None:
        loss = t.negative_logarithm(outputs)
        loss.backward()
    t.optimizer.step()


def in_parts(t, x):
    for part in (x[:1], x[1:]):
        labels = t.labels[: len(part)]
        loss = F.nll_loss(t.model(part).softmax(-1).log(), labels) / 2
        loss.backward()
    t.optimizer.step()


def scaled(t, x):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = t.negative_logarithm(t.model(x))
    scaler.scale(loss).backward()
    scaler.step(t.optimizer)


def stepped_elsewhere(t, x):
    loss = t.negative_logarithm(t.model(x))
    loss.backward()
    step(t)


def step(t):
    t.optimizer.step()


def without_the_model(t, x):
    loss = t.negative_logarithm(x @ t.model.weight.T + t.model.bias)
    loss.backward()
    t.optimizer.step()


def clipped(t, x):
    loss = t.negative_logarithm(t.model(x))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0)
    nn.utils.clip_grad_value_(t.model.parameters(), 1.0)
    t.optimizer.step()


class Loop:
    """A program's own trainer, which clips."""

    def __init__(self, t):
        self.model, self.optimizer, self.t = t.model, t.optimizer, t
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step_number = 0

    def loss_of(self, x):
        return self.t.negative_logarithm(self.model(x))

    def train(self, x):
        loss = self.loss_of(x)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.step_number += 1
        self.optimizer.step()


def of_a_trainer(t, x):
    Loop(t).train(x)


def of_a_function_that_is_called_loss(t, x):
    loss = t.negative_logarithm
    value = loss(t.model(x))
    value.backward()
    t.optimizer.step()


def in_no_variable(t, x):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(t.negative_logarithm(t.model(x))).backward()
    t.optimizer.step()


def of_an_output_that_has_a_variable(t, x):
    """What the function is given is no loss."""
    outputs = t.model(x)
    t.negative_logarithm(outputs).backward()
    t.optimizer.step()


WAYS = [
    *(in_a_line, in_lines, under_contexts, added_up, of_a_tuple, in_a_branch, scaled),
    *(stepped_elsewhere, without_the_model, clipped, of_a_trainer),
    of_a_function_that_is_called_loss,
    *(in_no_variable, of_an_output_that_has_a_variable),
]


def report_of(way, training=None, x=X):
    training = training or Training()
    try:
        with pytest.raises(NonFiniteError) as caught:
            way(training, x)
    finally:
        training.guard.remove()
    return caught.value.report.explanation


@pytest.mark.tries_remedies
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_operation_is_named(way):
    found = report_of(way)
    assert (found.phase, found.cause) == ("forward", "underflow")
    assert found.op.name == "aten.log" and found.op.file == __file__
    assert ".log()" in found.op.code
    assert sum(NOTE in note for note in found.notes) == 1
    best = found.remedies[0]
    assert best.is_finite and "log_softmax" in best.code and best.file == __file__


class Weighted(nn.Module):
    """A loss that counts its calls, relative to a mean that is not the model's."""

    def __init__(self, mean):
        super().__init__()
        self.mean, self.num_called = torch.tensor(mean), 0

    def forward(self, loss):
        self.num_called += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / self.mean


@pytest.mark.parametrize("mean", [1.0, float("nan")])
def test_a_counter_that_does_not_change_the_loss_is_no_matter(mean):
    criterion = Weighted(mean)

    def way(t, x):
        logs = t.negative_logarithm if mean == 1 else torch.sum
        loss = criterion(logs(t.model(x)))
        loss.backward()
        t.optimizer.step()

    found = report_of(way)
    if mean == 1:
        assert found.op.name == "aten.log"
    else:
        assert (found.cause, found.tensor) == ("unknown", "criterion.mean")
        assert "test_own_lines.py" in found.evidence[0]
        assert any("could not be put back" in note for note in found.notes)
        assert notes.WITHIN_RUN in found.notes


@pytest.mark.slow
@pytest.mark.tries_remedies
def test_accumulated_batches():
    found = report_of(in_parts)
    assert (found.cause, found.op.name) == ("underflow", "aten.log")
    assert not found.remedies  # the other batch has its bad gradients with them, too


def test_of_two_losses_nothing_is_said():
    def way(t, x):
        outputs = t.model(x)
        bad, good = t.negative_logarithm(outputs), outputs[:, 1].mean()
        bad.backward(retain_graph=True)
        good.backward()
        t.optimizer.step()

    found = report_of(way)
    assert found.cause == "unknown" and "good" not in str(found)


def test_a_loss_that_a_function_is_given():
    def way(t, x):
        loss = t.negative_logarithm(t.model(x))
        update(t, loss)

    def update(t, loss):
        loss.backward()
        t.optimizer.step()

    assert report_of(way).op.name == "aten.log"


def test_a_loss_of_an_object_that_holds_data():
    def way(t, x):
        outputs = torch.distributions.Categorical(probs=t.model(x).softmax(-1))
        action = outputs.sample()
        probability = outputs.probs[:, 0]
        loss = -(probability.log() * (action + 1)).mean()
        loss.backward()
        t.optimizer.step()

    assert report_of(way).op.name == "aten.log"


@pytest.mark.slow
@pytest.mark.tries_remedies
def test_what_is_said_is_what_guard_run_says():
    def with_the_guard(t, x):
        loss = t.guard.run(lambda: t.negative_logarithm(t.model(x)))
        loss.backward()
        t.optimizer.step()

    own, asked = report_of(in_a_line), report_of(with_the_guard)
    for part in ("phase", "cause", "module", "chain", "num_samples", "sample"):
        assert getattr(own, part) == getattr(asked, part)
    assert own.evidence[:1] == asked.evidence[:1]  # the others name lines
    assert [each.code for each in own.remedies] == [e.code for e in asked.remedies]


def explained_file(folder, text):
    """The explanation of a file that trains the model it is given."""
    file, training = folder / "train.py", Training()
    file.write_text(text)
    with pytest.raises(NonFiniteError) as caught:
        runpy.run_path(str(file), {"training": training, "x": X})
    training.guard.remove()
    return caught.value.report.explanation


def test_a_file_whose_function_is_called_loss(tmp_path):
    found = explained_file(
        tmp_path,
        "def loss(outputs):\n    return -outputs.softmax(-1).log()[:, 0].mean()\n"
        "value = loss(training.model(x))\nvalue.backward()\n"
        "training.optimizer.step()\n",
    )
    assert (found.cause, found.op.line) == ("underflow", 2)


@pytest.mark.tries_remedies
def test_code_of_a_file_itself(tmp_path):
    lines = [
        "outputs = training.model(x)",
        "probabilities = outputs.softmax(-1)",
        "loss = -probabilities.log()[:, 0].mean()",
        "loss.backward()",
        "training.optimizer.step()",
    ]
    found = explained_file(tmp_path, "\n".join(lines))
    assert (found.cause, found.op.line) == ("underflow", 3)
    assert found.remedies[0].is_finite and found.remedies[0].line == 3


def test_two_models():
    one, two = Training(), nn.Linear(2, 2)
    one.guard.remove()
    parameters = [*one.model.parameters(), *two.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    with OverflowGuard({"one": one.model, "two": two}, optimizer):
        with pytest.raises(NonFiniteError) as caught:
            made = two(X)
            loss = one.negative_logarithm(one.model(made))
            loss.backward()
            optimizer.step()
    assert caught.value.report.explanation.op.name == "aten.log"


def test_targets_of_a_forward_before_the_lines():
    def way(t, x):
        update(t, x, t.model(x + 1).detach())

    def update(t, x, targets):
        loss = t.negative_logarithm(t.model(x) + 0 * targets)
        loss.backward()
        t.optimizer.step()

    assert report_of(way).op.name == "aten.log"


def test_targets_that_the_loop_computes():
    def way(t, x):
        returns = torch.ones(4)
        targets = (returns - returns.mean()) / returns.std()
        values = t.model(x)[:, 0]
        loss = (values - targets).square().mean()
        loss.backward()
        t.optimizer.step()

    found = report_of(way)
    assert found.op.name == "aten.div.Tensor" and "returns.std()" in found.op.code


def test_weights_that_the_loop_computes_of_what_is_not_finite():
    def way(t, x):
        noise = torch.tensor([0.0, 0.1, 0.2, 0.3])
        ratio = (1 - noise) / noise
        weight = ratio / (ratio + 1)
        loss = (weight * t.model(x)[:, 0].square()).mean()
        loss.backward()
        t.optimizer.step()

    found = report_of(way)
    assert (found.cause, found.op.name) == ("undefined", "aten.div.Tensor")
    assert "/ noise" in found.op.code


def test_targets_that_the_loop_was_given():
    def way(t, x):
        targets = torch.tensor([1.0, float("nan"), 1.0, 1.0])
        loss = (t.model(x)[:, 0] - targets).square().mean()
        loss.backward()
        t.optimizer.step()

    found = report_of(way)
    assert (found.phase, found.cause, found.tensor) == ("data", "bad data", "targets")
    assert found.sample == 1


@pytest.mark.parametrize("count", [2, 16, 5000])
def test_what_is_drawn_before_the_model(count):
    """A diffusion's target: one is 0 by the noise that was drawn in the step."""

    def way(t, x):
        torch.rand(600)
        loss = drawn(t, x)
        loss.backward()
        t.optimizer.step()

    def drawn(t, x):
        noise = torch.rand(4, count)
        noises.append(noise)
        scale = noise[:, 0] - noises[0][:, 0].min()
        return (t.model(x + noise[:, :2] * 0.01)[:, 2] / scale).mean()

    noises = []
    found = report_of(way)
    assert (found.phase, found.op.name) == ("forward", "aten.div.Tensor")
    assert (
        found.op.code
        == "return (t.model(x + noise[:, :2] * 0.01)[:, 2] / scale).mean()"
    )
    assert torch.equal(noises[0], noises[-1])


# Lines that are not certain to be what ran.


def drawn_as_often_as_needed(t, x):
    loss = drawn_until_done(t, x)
    loss.backward()
    t.optimizer.step()


def drawn_until_done(t, x):
    """What follows many draws other than in the step may need few of them."""
    t.num_drawn = 0
    while torch.rand(()) < 0.999:
        t.num_drawn += 1
    return t.negative_logarithm(t.model(x + t.num_drawn))


def drawn_by_python(t, x):
    loss = drawn_of_python(t, x)
    loss.backward()
    t.optimizer.step()


def drawn_of_python(t, x):
    factor = random.random()
    return t.negative_logarithm(t.model(x)) * factor


def rebound(t, x):
    factor = torch.zeros(())
    loss = (t.model(x) / factor).mean()
    loss.backward()
    factor = torch.ones(())
    t.optimizer.step()
    return factor


def written_since(t, x):
    factor = torch.zeros(4)
    loss = (t.model(x)[:, 0] / factor).mean()
    loss.backward()
    factor[0] = 1
    t.optimizer.step()


def filled_since(t, x):
    factor = torch.zeros(4)
    loss = (t.model(x)[:, 0] / factor).mean()
    loss.backward()
    factor.fill_(1)
    t.optimizer.step()


def attribute_since(t, x):
    t.factor = torch.zeros(())
    loss = (t.model(x) / t.factor).mean()
    loss.backward()
    t.factor = torch.ones(())
    t.optimizer.step()


def counted(t, x):
    t.num_called = 0.0
    loss = count(t, x)
    loss.backward()
    t.optimizer.step()


def count(t, x):
    t.num_called += 1
    return (t.model(x) / (t.num_called - 1)).sum()


def other_by_now(t, x):
    t.factor = torch.zeros(4)
    divided(t, x).backward()
    change(t)
    t.optimizer.step()


def divided(t, x):
    return (t.model(x)[:, 0] / t.factor).mean()


def change(t):
    t.factor.copy_(torch.tensor([0.0, 1.0, 1.0, 1.0]))


def left(t, x):
    factor = torch.zeros(())
    for each in range(2):
        if each:
            factor = factor + 1
            break
        loss = (t.model(x) / factor).mean()
        loss.backward()
    t.optimizer.step()


def with_a_step(t, x):
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(1)
    loss = stepping(t, x, other)
    loss.backward()
    t.optimizer.step()


def stepping(t, x, other):
    other.step()
    return t.negative_logarithm(t.model(x))


def read_of_an_iterator(t, x):
    batches = iter([X, X])
    loss = t.negative_logarithm(t.model(next(batches)))
    loss.backward()
    t.optimizer.step()


def taken(t, x):
    t.batches = iter([X, X])
    loss = take(t)
    loss.backward()
    t.optimizer.step()


def take(t):
    return t.negative_logarithm(t.model(next(t.batches)))


def shared(t, x):
    batches = (each for each in [X, X])
    loss = take_of(t, batches)
    loss.backward()
    t.optimizer.step()


def take_of(t, batches):
    return t.negative_logarithm(t.model(next(batches)))


UNCERTAIN = [
    *(
        drawn_as_often_as_needed,
        drawn_by_python,
        rebound,
        written_since,
        filled_since,
        counted,
        left,
    ),
    *(with_a_step, read_of_an_iterator, taken, shared, attribute_since, other_by_now),
]


@pytest.mark.tries_remedies
@pytest.mark.parametrize("way", UNCERTAIN, ids=lambda way: way.__name__)
def test_nothing_is_said_of_other_code(way):
    found = report_of(way)
    assert found.op is None and found.cause == "unknown"
    assert not any(NOTE in note for note in found.notes)
    assert any("guard.run(lambda: loss)" in note for note in found.notes)


@pytest.mark.tries_remedies
def test_steps_that_must_not_be_replayed():
    found = report_of(in_lines, Training(explain=Explain(replay_safe=False)))
    assert found.replays == 0 and found.op is None


# What is run again leaves nothing behind.


def test_code_without_a_source_is_no_matter():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    space = {"model": model, "optimizer": optimizer, "torch": torch}
    lines = "loss = torch.log(model(torch.ones(3, 2)) * 0).mean()\nloss.backward()\n"
    with OverflowGuard(model, optimizer, explain=True):
        with pytest.raises(NonFiniteError) as caught:
            exec(compile(f"{lines}optimizer.step()", "<cell>", "exec"), space)
    assert "guard.run(lambda: loss)" in str(caught.value.report.explanation)


def test_nothing_is_left_behind(capsys):
    def way(t, x):
        outputs = t.model(x)
        print("called")
        probabilities = F.dropout(outputs.softmax(-1), 0.01)
        loss = F.nll_loss(probabilities.log(), t.labels)
        loss.backward()
        states.append(torch.get_rng_state())
        gradients.extend(p.grad.clone() for p in t.model.parameters())
        t.optimizer.step()

    states, gradients, training = [], [], Training()
    weights = [p.detach().clone() for p in training.model.parameters()]
    assert report_of(way, training).op.name == "aten.log"
    assert capsys.readouterr().out == "called\n"
    assert torch.equal(torch.get_rng_state(), states[0])
    now = list(training.model.parameters())
    assert all(map(torch.equal, now, weights))
    for one, own in zip(gradients, now, strict=True):
        assert torch.equal(one.nan_to_num(), own.grad.nan_to_num())
    assert not training.model._forward_hooks or not training.guard.is_attached
    assert training.num_called == 0


calls_in_all = 0


def test_variables_that_the_lines_count_in_stay():
    training, num_called = Training(on_overflow="skip", explain=True), 0

    def loss_of(x):
        nonlocal num_called
        global calls_in_all
        num_called += 1
        calls_in_all += 1
        return training.negative_logarithm(training.model(x))

    loss = loss_of(X)
    loss.backward()
    training.optimizer.step()
    assert training.guard.last_report.explanation.op.name == "aten.log"
    assert (num_called, calls_in_all) == (1, 1)


@pytest.mark.slow
def test_variables_of_the_loop_are_let_go():
    training = Training(on_overflow="skip", explain=True)
    references = []
    for _ in range(2):
        outputs = training.model(X)
        references.append(weakref.ref(outputs))
        loss = training.negative_logarithm(outputs)
        loss.backward()
        training.optimizer.step()
        assert training.guard.last_report.explanation.op is not None
        del outputs, loss
    training.guard.remove()
    gc.collect()
    assert [each() for each in references] == [None, None]


SCRIPT = """import torch
from overflow_fast import OverflowGuard
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
OverflowGuard(layer, optimizer, "warn")
with torch.no_grad():
    layer.weight.copy_(torch.eye(2))
p = torch.softmax(layer(torch.tensor([[400.0, -400.0]])), -1)
loss = torch.log(p).mean()
loss.backward()
optimizer.step()
"""


@pytest.mark.slow
def test_in_a_script_a_layer_is_called_once_with_a_remedy_too(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = python(str(path))
    assert "p = torch.softmax((exact_argument := layer(" in done.stderr, done.stderr
    assert "loss = exact_argument.log_softmax(-1).mean()" in done.stderr
