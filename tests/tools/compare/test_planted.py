"""Planted differences are named, and healthy pairs are silent: pairs of whole runs.

Each pair trains a small model for three steps, with one thing changed in the first run.
"""

import contextlib
import copy
import functools

import pytest
import torch
from assembled import Assembled
from planted_runs import BATCH, LENGTH, Run, adam, cross_entropy, ids_of, keep_of, sgd
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import overflow_fast

pytestmark = pytest.mark.filterwarnings("ignore")


def at(path, change):
    """Changes a module of the model, or a value of one of its attributes."""

    def apply(model):
        change(model.get_submodule(path))

    return apply


def put(path, **values):
    return at(path, lambda module: [setattr(module, k, v) for k, v in values.items()])


def place(path, make):
    """Puts another module in the place of one."""

    def apply(model):
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))

    return apply


def multiplied(path, name, factor, index=None):
    def apply(model):
        with torch.no_grad():
            tensor = getattr(model.get_submodule(path), name)
            (tensor if index is None else tensor.view(-1)[index : index + 1]).mul_(
                factor
            )

    return apply


class Wrong(torch.autograd.Function):
    """The identity, with a wrong gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


class WrongLinear(nn.Linear):
    def forward(self, x):
        return functional.linear(Wrong.apply(x), self.weight, self.bias)


def wrong_linear(module):
    other = WrongLinear(module.in_features, module.out_features)
    other.load_state_dict(module.state_dict())
    return other


def wrong_compiler(graph, inputs):
    for node in graph.graph.nodes:
        if node.target is functional.gelu or node.target is torch._C._nn.gelu:
            node.target, node.kwargs = functional.silu, {}
    graph.recompile()
    return graph


def compiled(backend):
    return at("blocks.1.act", lambda module: module.compile(backend=backend))


def tied(model):
    model.head.weight = model.token.weight


def scaled_gradients(factor):
    def change(model, step):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    return change


def in_step(step, change):
    return lambda model, number: change(model) if number == step else None


def batches(ids=lambda ids, step: ids, keep=lambda keep: keep, **sizes):
    return lambda step: (ids(ids_of(step, **sizes), step), keep(keep_of(**sizes)))


def drawn(p):
    return lambda model: put("blocks.0.drop", p=p)(model)


BF16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)

# What is planted shows in the first steps: few pairs of each kind go on after it.
OneStep, TwoSteps = (functools.partial(Run, steps=n) for n in (1, 2))

# The first run; the kind, the module and words of the answer; the reference, if it is
# not `Run()`. None: any. Settings of modules and optimizers, gradients that stay, and
# what is done to all of them have files of their own.
PLANTED = {
    # Weights.
    "seed": (OneStep(seed=1), "weights", "token", "parameters and buffers differ"),
    "element": (
        OneStep(multiplied("blocks.0.attention.k", "weight", 1.5, 7)),
        *("weights", "blocks.0.attention.k", "1 of 40"),
    ),
    "buffer": (
        OneStep(multiplied("batch_norm", "running_var", 1.1)),
        *("weights", "batch_norm", "running_var: buffer"),
    ),
    "weight of a later step": (
        Run(before=in_step(2, multiplied("blocks.1.up", "weight", 1.01))),
        *("forward", "blocks.1.up", "In step 2: "),
    ),
    # Layers.
    "relu": (
        OneStep(place("blocks.1.act", lambda m: nn.ReLU())),
        *("forward", "blocks.1.act", "ReLU"),
    ),
    "small eps": (
        OneStep(put("blocks.0.norm2", eps=1e-6)),
        *("forward", "blocks.0.norm2", "eps is 1e-06, against 1e-05"),
    ),
    "causal": (
        OneStep(put("blocks.0.attention", causal=False)),
        *("forward", "blocks.0.attention", "causal is False, against True"),
    ),
    "position": (OneStep(put("", offset=1)), "forward", "", "offset is 1, against 0"),
    "functional factor": (
        OneStep(put("", factor=1.01)),
        *("forward", "", "after batch_norm. Its factor is 1.01"),
    ),
    "in-place residual": (
        OneStep(put("blocks.1", mix=lambda x, y: y.add_(x, alpha=1.01))),
        *("forward", "blocks.1", ", after blocks.1.drop"),
    ),
    "float16 layer": (
        OneStep(put("blocks.0", mix=lambda x, y: x + y.half().float())),
        *("forward", "blocks.0", ", after blocks.0.drop"),
    ),
    "batch norm in eval": (
        OneStep(at("batch_norm", lambda m: m.eval())),
        *("forward", "batch_norm", "training is False, against True"),
    ),
    "compiled": (
        OneStep(compiled(wrong_compiler)),
        *("forward", "blocks.1.act", "", OneStep(compiled("eager"))),
    ),
    # Gradients.
    "frozen": (
        TwoSteps(at("blocks.1.up", lambda m: m.requires_grad_(False))),
        *(
            "weights",
            "blocks.1.up",
            "Its requires_grad is False of weight, bias, against True",
        ),
    ),
    "wrong backward": (
        OneStep(place("blocks.0.up", wrong_linear)),
        *("backward", "blocks.0"),
        "One of blocks.0.up, or code of blocks.0 itself",
    ),
    "other clipping": (
        OneStep(gradients=lambda m, s: clip_grad_norm_(m.parameters(), 0.05)),
        *("gradients", "", "times the reference"),
        OneStep(gradients=lambda m, s: clip_grad_norm_(m.parameters(), 0.1)),
    ),
    # The loss.
    "sum": (
        OneStep(loss=functools.partial(cross_entropy, reduction="sum")),
        *("loss", "", "it is 56 times the reference"),
    ),
    "label smoothing": (
        OneStep(loss=functools.partial(cross_entropy, label_smoothing=0.1)),
        *("loss", "", ""),
    ),
    # The update.
    "Adam's eps": (
        TwoSteps(optimizer=functools.partial(adam, eps=1e-3)),
        *("update", None, "Before step 1"),
    ),
    "nesterov": (
        TwoSteps(optimizer=functools.partial(sgd, momentum=0.9, nesterov=True)),
        *("update", None, "Before step 1"),
        TwoSteps(optimizer=functools.partial(sgd, momentum=0.9)),
    ),
    # The batch.
    "permuted samples": (
        OneStep(batch=batches(lambda ids, s: ids.roll(1, 0))),
        *("batch", "", ""),
    ),
    "sequence length": (
        OneStep(batch=batches(length=LENGTH + 1)),
        *("batch", "", "of shapes (8, 9) and (8, 8)"),
    ),
    "mask": (
        OneStep(batch=batches(keep=lambda k: k | True)),
        *("batch", "", "input[1]"),
    ),
    "batch of a later step": (
        Run(batch=batches(lambda ids, step: ids.flip(0) if step == 2 else ids)),
        *("batch", "", "In step 2: "),
    ),
    # Half precision.
    "eps in bfloat16": (
        OneStep(put("blocks.0.norm2", eps=1.0), context=BF16),
        *("forward", "blocks.0.norm2", "eps is 1.0, against 1e-05"),
    ),
}


def keep_functions(model):
    """The same by other code: linear layers as functions."""
    for block in model.blocks:
        own = block.up
        block.up.forward = lambda x, own=own: x @ own.weight.T + own.bias


def renamed(model):
    class Other(Assembled):
        def forward(self, ids, keep):
            return self.inner(ids, keep)

    return Other(inner=copy.deepcopy(model))


def foreign_hooks(model):
    for module in model.modules():
        module.register_forward_hook(lambda *_: None)
        module.register_full_backward_hook(lambda *_: None)


def in_order(parameters, **options):
    return adam(parameters[::-1], **options)


def used_generator(model, step):
    torch.rand(5)


@contextlib.contextmanager
def mode(function, value, old):
    function(value)
    try:
        yield
    finally:
        function(old)


def wide(model):
    return model.double()


def transposed_memory(module):
    module.weight.data = module.weight.data.mT.contiguous().mT


def fused(model):
    for block in model.blocks:
        block.attention.fused = True


NUM_LABELS = BATCH * (LENGTH - 1)
DEFAULTS = torch.float64, torch.float32


def all_of(*changes):
    """Makes changes of a model, or of a model in a step, one after another."""

    def apply(*given):
        for change in changes:
            change(*given)

    return apply


def halved_and_doubled(model, step):
    scaled_gradients(0.5)(model, step)
    scaled_gradients(2.0)(model, step)


# Runs that are as `Run()`, or as each other. What changes no bit is done all at once.
HEALTHY = {
    "equal": Run(),
    "changes no bit": Run(
        all_of(
            foreign_hooks,
            put("blocks.0", recomputed=True),
            put("blocks.1", mix=lambda x, y: y + x),
            at("blocks.1.up", transposed_memory),
            put("batch_norm", eps=1.00000001e-5),
        ),
        in_order,
        gradients=all_of(
            halved_and_doubled,
            lambda m, s: clip_grad_norm_(m.parameters(), 1e6),
        ),
        before=used_generator,
        context=lambda: mode(torch.use_deterministic_algorithms, True, False),
        drawn=5,
        steps=2,
    ),
    "in-place residual": OneStep(put("blocks.1", mix=lambda x, y: y.add_(x))),
    "a factor that is a power of two": TwoSteps(
        put("blocks.1", mix=lambda x, y: (2 * x + 2 * y) / 2)
    ),
    "both as no other": [
        TwoSteps(all_of(tied, drawn(0.1), fused), sgd),
        TwoSteps(all_of(tied, drawn(0.1), fused), sgd),
    ],
    "both in eval, clipped and scaled": [
        TwoSteps(
            lambda m: m.eval() and None,
            loss=lambda a, b: 1024 * cross_entropy(a, b),
            gradients=all_of(
                scaled_gradients(1 / 1024),
                lambda m, s: clip_grad_norm_(m.parameters(), 0.1),
            ),
        ),
        TwoSteps(
            lambda m: m.eval() and None,
            loss=lambda a, b: 1024 * cross_entropy(a, b),
            gradients=all_of(
                lambda m, s: [p.grad.div_(1024) for p in m.parameters()],
                lambda m, s: clip_grad_norm_(m.parameters(), 0.1, foreach=False),
            ),
        ),
    ],
    "rounds otherwise": TwoSteps(
        all_of(
            put("blocks.0.attention", fused=True),
            put("blocks.1.attention", masked=-1e30),
            keep_functions,
        ),
        functools.partial(adam, foreach=False),
        loss=lambda a, b: cross_entropy(a, b, reduction="sum") / NUM_LABELS,
    ),
    "fused optimizer": TwoSteps(optimizer=functools.partial(adam, fused=True)),
    "loss by log softmax": OneStep(
        loss=lambda a, b: functional.nll_loss(
            a[:, :-1].flatten(0, 1).log_softmax(-1), b[:, 1:].flatten()
        )
    ),
    "one step of three": Run(options={"steps": [1]}),
    "fewer steps": Run(steps=2),
    "autocast": [OneStep(context=BF16), OneStep()],
    "autocast, both": [OneStep(context=BF16), OneStep(context=BF16)],
    "bfloat16": [OneStep(lambda m: m.bfloat16()), OneStep()],
    "float64, three steps": Run(wide),
    "compiled by eager": TwoSteps(compiled("eager")),
    "wrapped": OneStep(renamed),
    "default dtype": OneStep(context=lambda: mode(torch.set_default_dtype, *DEFAULTS)),
}

_QUICK = 4  # one of so many is in the quick selection


def sampled(table):
    slow = [pytest.mark.slow]
    return [
        pytest.param(name, id=name, marks=slow if number % _QUICK else [])
        for number, name in enumerate(table)
    ]


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    """A recording of the run that is most pairs' reference."""
    folder = tmp_path_factory.mktemp("default")
    Run().record(folder)
    return folder


@pytest.fixture
def compared(tmp_path, default):
    """Records two runs and compares them."""

    def compare(first, reference=None):
        first.record(tmp_path / "a")
        if reference is None:
            return overflow_fast.compare(tmp_path / "a", default)
        reference.record(tmp_path / "b")
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


@pytest.mark.parametrize("name", sampled(PLANTED))
def test_a_planted_difference_is_named(compared, name):
    first, kind, module, words, *reference = PLANTED[name]
    diff = compared(first, *reference)
    assert diff.differs and diff.first is not None, diff
    assert kind in (None, diff.first.kind), diff
    assert module in (None, diff.first.module), diff
    assert words in str(diff.first), diff


@pytest.mark.parametrize("name", sampled(HEALTHY))
def test_a_healthy_pair_is_silent(compared, name):
    runs = HEALTHY[name]
    diff = compared(*(runs if isinstance(runs, list) else [runs]))
    assert diff.first is None and not diff.differs, diff
    assert diff.num_computed


def head_gradient(change):
    return lambda model, step: change(model.head.weight.grad)


def test_a_gradient_of_nans_is_no_multiple(compared, as_kept):
    run = Run(gradients=head_gradient(lambda g: g.fill_(torch.nan)), steps=1)
    as_kept(str(compared(run, Run(steps=1)).first))


def test_one_gradient_that_is_a_multiple_is_one(compared, as_kept):
    run = Run(gradients=head_gradient(lambda g: g.mul_(0.5)), steps=1)
    as_kept(str(compared(run, Run(steps=1)).first))


def test_a_step_without_gradients_in_one_run_is_not_called_equal(compared, as_kept):
    def drop(model, step):
        if step == 0:
            model.zero_grad()

    diff = compared(Run(gradients=drop))
    assert (diff.first.kind, diff.first.row.step) == ("weights", 1), diff
    as_kept(diff.first)
