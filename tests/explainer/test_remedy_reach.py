"""Remedies reach the replay's own torch calls, wherever they are, and no others."""

import sys
import threading

import pytest
import torch
from remedied_files import Holder, explained, module_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import explain
from overflow_fast.explainer.remedies.call_patch import CallPatch, RuleChange
from overflow_fast.explainer.remedies.rules import RULES
from overflow_fast.explainer.tensor_kinds import kinds_of
from overflow_fast.explainer.torch_calls import TorchCalls

# Each has `log(x)`, which a second thread calls with 0, and `loss_of(x, w)`.
KINDS = {
    "function": """
def log(x):
    return torch.log(x)
""",
    "closure": """
def make(eps):
    def log(x):
        return torch.log(x + eps)
    return log
log = make(0.0)
""",
    "generator": """
def values(x):
    yield x
    yield torch.log(x)
def log(x):
    return list(values(x))[1]
""",
    "wrapped": """
def plain(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
@plain
def log(x):
    return torch.log(x)
""",
    "comprehension": """
def log(x):
    return [torch.log(each) for each in [x]][0]
""",
    "global": '''
num_calls = 0
def log(x):
    """Counts its calls."""
    global num_calls
    num_calls += 1
    return torch.log(x)
''',
    "recursion": """
def log(x, depth=3):
    if depth:
        return log(x, depth - 1)
    return torch.log(x)
""",
    "coroutine": """
async def later(x):
    return torch.log(x)
def log(x):
    try:
        later(x).send(None)
    except StopIteration as end:
        return end.value
""",
    "statement": """
def log(x):
    y = x + 1.0
    y /= x
    return -y
""",
}
SOURCE = """import functools
import torch
{}
def loss_of(x, w):
    return log(x * w).mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_call_is_changed_in_code_of_any_kind(name, tmp_path):
    """Another thread that calls the same line meanwhile gets its own result."""
    module, _ = module_of(tmp_path, SOURCE.format(KINDS[name]))
    zeros, seen = torch.zeros(2), []
    stop = threading.Event()

    def call():
        while not stop.is_set():
            seen.append(module.log(zeros))

    other = threading.Thread(target=call)
    other.start()
    codes = {k: f.__code__ for k, f in vars(module).items() if hasattr(f, "__code__")}
    found = explained(module.loss_of, torch.zeros(3, 2))
    stop.set()
    other.join()
    assert [each.is_recommended for each in found.remedies][:1] == [True], found
    assert len(seen) > found.replays > 2
    assert all(bool((each == -torch.inf).all()) for each in seen)
    assert all(getattr(module, k).__code__ is code for k, code in codes.items())
    assert module.log(zeros).isinf().all()


def without_a_file(tmp_path):
    space = {"torch": torch}
    exec("def loss_of(x, w):\n    return torch.log(x * w).mean()\n", space)
    return space["loss_of"]


def through_distributions(tmp_path):
    normal = torch.distributions.Normal
    return lambda x, w: normal(x * w, x * w, validate_args=False).log_prob(x).mean()


def a_module_of_torch(tmp_path):
    softmax = nn.Softmax(-1)
    masked = lambda x, w: (x * w).masked_fill(x == 0, -torch.inf)  # noqa: E731
    return lambda x, w: softmax(masked(x, w))[:, 0].mean()


def checkpointed(is_reentrant):
    def make(tmp_path):
        log = lambda y: torch.log(y)  # noqa: E731
        return lambda x, w: checkpoint(log, x * w, use_reentrant=is_reentrant).mean()

    return make


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=1).log()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / x


def the_backward_of_a_function(tmp_path):
    return lambda x, w: Logs.apply(x * w).mean()


def a_gradient_of_a_gradient(tmp_path):
    def loss_of(x, w):
        y = x * w
        (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return slope.norm(dim=-1).sqrt().mean()

    return loss_of


def on_a_device(tmp_path):
    def loss_of(x, w):
        with torch.device("cpu"):
            return torch.log(x * w + torch.zeros(2)).mean()

    return loss_of


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_mode_of_ones_own(tmp_path):
    def loss_of(x, w):
        with Passing():
            return torch.log(x * w).mean() + torch.exp(x).sum() * 0

    return loss_of


def in_autocast(tmp_path):
    def loss_of(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.log(x @ w).mean()

    return loss_of


REACHED = {
    "within a default device": on_a_device,
    "within a mode of one's own": in_a_mode_of_ones_own,
    "within autocast": in_autocast,
    "code without a file": without_a_file,
    "an installed package": through_distributions,
    "a module of torch": a_module_of_torch,
    "a checkpoint": checkpointed(False),
    "a reentrant checkpoint": checkpointed(True),
    "the backward of a custom function": the_backward_of_a_function,
    "a gradient of a gradient": a_gradient_of_a_gradient,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REACHED)
def test_what_no_edit_reaches_is_changed(name, tmp_path):
    state = torch.get_rng_state()
    found = explained(REACHED[name](tmp_path), torch.zeros(3, 2))
    good = [each for each in found.remedies if each.is_recommended]
    assert good and "did not help" not in str(good[0]), found
    assert torch.get_rng_state().equal(state)


def test_modes_stay_on_in_backward():
    """Else checkpoints and custom functions show no calls."""
    x = torch.rand(3, requires_grad=True)
    with TorchCalls() as calls:
        y = checkpoint(torch.sin, x, use_reentrant=False).sum()
        num_before = len(calls.calls)
        torch.autograd.backward([y])
    names = [call.name for call in calls.calls[num_before:]]
    assert "sin" in names, "torch changed what a mode sees in backward"
    with TorchCalls() as calls:
        torch.autograd.grad(Logs.apply(x * 2).sum(), x)
    assert "div" in [call.name for call in calls.calls]


def test_a_call_knows_its_instruction_and_its_columns():
    x = torch.rand(3)
    with TorchCalls() as calls:
        y = [torch.sin(x), torch.sin(x)]
    assert len(y) == 2 and calls.calls[0].key != calls.calls[1].key
    if sys.version_info >= (3, 11):
        spans = [call.sites[0].span for call in calls.calls]
        assert [each[3] - each[2] for each in spans] == [len("torch.sin(x)")] * 2


def test_calls_of_this_package_are_none_of_the_programs():
    x = torch.tensor([1.0, torch.inf])
    with TorchCalls() as calls:
        assert kinds_of(x)
    assert calls.calls == []


def test_a_thread_that_the_forward_starts_ends_the_replay(as_kept):
    def loss_of(x, w):
        logs = []
        thread = threading.Thread(target=lambda: logs.append(torch.log(x * 0)))
        thread.start()
        thread.join()
        return (logs[0] * w).mean()

    found = explained(loss_of, torch.zeros(3, 2))
    as_kept(found.notes)
    assert not found.remedies


@pytest.mark.parametrize("kind", ["method", "no gradient", "inference"])
def test_a_call_that_writes_to_its_argument(kind):
    def loss_of(x, w):
        y = (x * w).clone()
        if kind == "method":
            return y.log_().mean()
        with torch.no_grad() if kind == "no gradient" else torch.inference_mode():
            z = x - 1.0
            z.sqrt_()
        return (z.clone() * w).mean()

    found = explained(loss_of, torch.zeros(3, 2))
    good = [each for each in found.remedies if each.is_recommended]
    assert good, found


@pytest.mark.parametrize("line", ["y.mul_(1.0).log_()", "y.view(-1).log_()"])
def test_what_is_written_to_without_a_name_is_no_expression(line, tmp_path):
    """A line that computes a new tensor leaves the one that has to be written to."""
    text = "def loss_of(x, w):\n    y = x * w\n    {}\n    return y.mean()\n"
    module, _ = module_of(tmp_path, text.format(line))
    found = explained(module.loss_of, torch.zeros(3, 2))
    assert any(each.is_recommended for each in found.remedies)
    assert not [each for each in found.remedies if each.file and each.code]


def test_subclasses_of_tensors_are_left_as_they_are():
    class Named(torch.Tensor):
        pass

    def log(x):
        return torch.log(x.as_subclass(Named))

    x = torch.zeros(3)
    with TorchCalls() as calls:
        log(x)
    guard = max(i for i, rule in enumerate(RULES) if rule.pattern == "log(y)")
    patch = CallPatch((RuleChange(calls.calls[-1].key, guard, torch.float32),))
    with patch.applied({}):
        found = log(x)
    assert type(found) is Named and found.isfinite().all() and patch.is_applied


def test_layers_that_share_a_line_are_all_changed():
    class Layer(nn.Module):
        def forward(self, y):
            return torch.sqrt(y * 0)

    model = nn.Sequential(Holder(), *(Layer() for _ in range(3)))
    model[0].forward = lambda x: x * model[0].w
    found = explain(model, torch.zeros(3, 2), lambda x: model(x).mean())
    assert found.remedies[0].is_recommended, found
