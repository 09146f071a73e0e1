"""Whatever a module holds: audits, replays, skips and raises leave no trace of it."""

import array
import collections
import copy
import functools
import gc
import random
import types

import numpy
import pytest
import torch
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, advise_precision, compare_live
from overflow_fast.monitors import LayerAudit, MaskedOps

pytestmark = pytest.mark.explains

NAN = float("nan")


class Slotted:
    __slots__ = ("items", "missing", "number")

    def __init__(self):
        self.number, self.items = 0, []


class Mapped(dict):
    """A dict with attributes of its own."""


class Plain:
    def __init__(self):
        self.number, self.inner, self.array = 0, types.SimpleNamespace(n=0), [0]


class Tagged(torch.Tensor):
    """A tensor with attributes of its own."""


class Pair(tuple):
    """A tuple with attributes of its own."""


class Array(numpy.ndarray):
    """An array with attributes of its own."""


def drawn(name, make, draw):
    """A kind of generator: what it is, how it is drawn from, what it draws next."""
    return (
        lambda m: setattr(m, name, make()),
        lambda m, x: draw(getattr(m, name)),
        lambda m: draw(twin_of(getattr(m, name))),
    )


def twin_of(generator):
    if isinstance(generator, torch.Generator):
        return generator.clone_state()
    return copy.deepcopy(generator)


def a_list(m):
    m.items = [0]


def nested(m):
    m.nested = {"h": [{"k": collections.deque([1], maxlen=3)}], "s": {1}}


def mutate_nested(m, x):
    inner = m.nested["h"][0]["k"]
    inner.append(len(inner))
    m.nested["s"].add(float(x.detach().sum()))
    m.nested["h"].append({"new": []})


def read_nested(m):
    return repr(m.nested["h"]), sorted(map(repr, m.nested["s"]))


def aliased(m):
    m.first, m.second = nn.Module(), nn.Module()
    m.first.shared = m.second.shared = m.shared = [torch.zeros(2), {"n": 0}]


def mutate_aliased(m, x):
    m.first.shared[0] += 1
    m.second.shared[1]["n"] += 1
    m.shared.append(len(m.shared))


def read_aliased(m):
    same = m.first.shared is m.second.shared is m.shared
    return same, m.shared[0].tolist(), m.shared[1:]


def counted(m):
    m.counter, m.default = collections.Counter(), collections.defaultdict(list)
    m.ordered = collections.OrderedDict(a=1, b=2)
    m.mapped = Mapped(a=[1])
    m.mapped.extra = 0


def mutate_counted(m, x):
    m.counter["a"] += 1
    m.default["b"].append(1)
    m.ordered.move_to_end("a")
    m.mapped["a"].append(2)
    m.mapped.extra += 1


def read_counted(m):
    ordered = list(m.ordered.items())
    return dict(m.counter), dict(m.default), ordered, dict(m.mapped), m.mapped.extra


def arrays(m):
    m.array, m.objects = numpy.zeros((2, 3)), numpy.array([[], {}], dtype=object)
    m.raw = bytearray(b"ab")
    m.view = m.array[0]


def mutate_arrays(m, x):
    m.view += 1
    m.array[1, 2] -= 2
    m.objects[1]["n"] = len(m.objects[0])
    m.objects[0].append(1)
    m.raw[0] += 1


def read_arrays(m):
    is_view = numpy.shares_memory(m.view, m.array)
    return m.array.tolist(), repr(m.objects.tolist()), bytes(m.raw), is_view


def objects(m):
    m.slotted, m.plain = Slotted(), Plain()


def mutate_objects(m, x):
    m.slotted.number += 1
    m.slotted.items.append(1)
    m.slotted.missing = 1
    m.plain.number += 1
    m.plain.inner.n -= 1
    m.plain.array[0] += 2
    m.plain.new = [m.plain.number]


def read_objects(m):
    s, p = m.slotted, m.plain
    own = s.number, list(s.items), getattr(s, "missing", None)
    return own, p.number, p.inner.n, list(p.array), getattr(p, "new", None)


def tensors(m):
    m.register_buffer("replaced", torch.zeros(3))
    m.register_buffer("written", torch.zeros(3))
    m.register_buffer("late", None)
    m.register_buffer("large", torch.zeros(2**19))
    m.cache, m.last = [torch.zeros(2)], None
    m.scale = nn.Parameter(torch.ones(2))
    m.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def mutate_tensors(m, x):
    m.replaced = m.replaced + 1
    m.written += x.detach().nan_to_num().abs().sum()
    m.late = torch.ones(1) if m.late is None else m.late
    m.large.add_(1)
    m.cache[0] += 1
    m.cache.append(torch.zeros(1))
    m.last = x.detach()
    m.frozen.data.mul_(1.5)
    with torch.no_grad():
        m.scale.mul_(0.5)


def read_tensors(m):
    late = None if m.late is None else m.late.tolist()
    own = [m.replaced.tolist(), m.written.tolist(), late, float(m.large.sum())]
    cached = [each.tolist() for each in m.cache]
    return own, cached, m.scale.tolist(), m.frozen.tolist()


def attributes(m):
    m.number, m.gone, m.text = 0, 1, "a"


def mutate_attributes(m, x):
    m.number += 1
    m.text += "b"
    m.__dict__.pop("gone", None)
    m.new = [m.number]


def read_attributes(m):
    return m.number, m.text, hasattr(m, "gone"), getattr(m, "new", None)


def attributes_of_values(m):
    m.tagged = torch.zeros(2)
    m.tagged.number = 0
    m.weight = nn.Parameter(torch.ones(2))
    m.weight.ages = [0]
    m.subclass, m.pair = torch.zeros(1).as_subclass(Tagged), Pair((1, 2))
    m.subclass.number = m.pair.number = 0
    m.view = numpy.zeros(2).view(Array)
    m.view.seen = []


def mutate_attributes_of_values(m, x):
    for each in (m.tagged, m.subclass, m.pair):
        vars(each)["number"] = vars(each).get("number", 0) + 1  # copies have none
    vars(m.weight).setdefault("ages", []).append(1)
    m.view.seen.append(1)


def read_attributes_of_values(m):
    each = [each.number for each in (m.tagged, m.subclass, m.pair)]
    return each, m.weight.ages, m.view.seen


def methods(m):
    m.partial = functools.partial(list.append, [])
    m.add = [].append
    m.draw = random.Random(0).random


def mutate_methods(m, x):
    m.partial(1)
    m.add(1)
    m.draw()


def read_methods(m):
    own = list(m.partial.args[0]), list(m.add.__self__)
    return own, m.draw.__self__.getstate()


def resized(m):
    m.register_buffer("grown", torch.zeros(2))
    m.register_buffer("turned", torch.zeros(2))
    m.floats, m.integers = numpy.zeros(2), array.array("i", [1])
    m.sparse = torch.sparse_coo_tensor(
        [[0, 1]], [1.0, 2.0], (3,), check_invariants=True
    )


def mutate_resized(m, x):
    m.grown.resize_(m.grown.numel() + 1).fill_(1)
    m.turned.unsqueeze_(0)
    m.floats.resize(len(m.floats) + 1, refcheck=False)
    m.integers.append(2)
    m.sparse.mul_(2)


def read_resized(m):
    own = m.grown.tolist(), m.turned.shape
    more = m.floats.tolist(), m.integers.tolist()
    return own, more, m.sparse.to_dense().tolist()


def optimizers(m):
    m.inner = nn.Parameter(torch.ones(2))
    m.optimizers = [torch.optim.Adam([m.inner])]
    m.schedule = torch.optim.lr_scheduler.ExponentialLR(m.optimizers[0], 0.5)


def mutate_optimizers(m, x):
    m.inner.grad = torch.ones(2)
    m.optimizers[0].step()
    m.inner.grad = None
    m.schedule.step()


def read_optimizers(m):
    own = m.optimizers[0].state_dict()
    return m.inner.tolist(), repr(own), m.schedule.last_epoch


class Draws(random.Random):
    """A generator with attributes of its own."""


def draws(m):
    m.draws = Draws(5)
    m.draws.items = []


def mutate_draws(m, x):
    m.draws.items.append(m.draws.random())


def read_draws(m):
    return m.draws.items, m.draws.getstate()


KINDS = {
    "list": (a_list, lambda m, x: m.items.append(1), lambda m: list(m.items)),
    "nested": (nested, mutate_nested, read_nested),
    "aliased": (aliased, mutate_aliased, read_aliased),
    "counted": (counted, mutate_counted, read_counted),
    "arrays": (arrays, mutate_arrays, read_arrays),
    "objects": (objects, mutate_objects, read_objects),
    "tensors": (tensors, mutate_tensors, read_tensors),
    "attributes": (attributes, mutate_attributes, read_attributes),
    "attributes of values": (
        attributes_of_values,
        mutate_attributes_of_values,
        read_attributes_of_values,
    ),
    "methods": (methods, mutate_methods, read_methods),
    "resized": (resized, mutate_resized, read_resized),
    "optimizers": (optimizers, mutate_optimizers, read_optimizers),
    "torch": drawn(
        "torch_rng",
        lambda: torch.Generator().manual_seed(0),
        lambda g: float(torch.rand((), generator=g)),
    ),
    "numpy": drawn(
        "numpy_rng", lambda: numpy.random.default_rng(0), lambda g: g.random()
    ),
    "legacy": drawn(
        "legacy_rng", lambda: numpy.random.RandomState(0), lambda g: g.randn()
    ),
    "python": drawn("python_rng", lambda: random.Random(0), lambda g: g.gauss(0, 1)),
    "own generators": (draws, mutate_draws, read_draws),
    "global": (
        lambda m: None,
        lambda m, x: (torch.rand(1), random.random(), numpy.random.randn()),
        lambda m: None,
    ),
}


class Holder(nn.Module):
    """Holds state of some kinds, all of which its forward changes."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds = [KINDS[kind] for kind in kinds]
        for make, _, _ in self.kinds:
            make(self)

    def forward(self, x):
        for _, mutate, _ in self.kinds:
            mutate(self, x)
        return x

    def facts(self):
        return repr([read(self) for _, _, read in self.kinds])


def some(seed):
    chosen = random.Random(seed)
    return [chosen.sample(sorted(KINDS), 3) for _ in range(2)]


class Net(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        first, second = kinds
        self.first, self.a = nn.Linear(4, 4), Holder(first)
        self.embedding = nn.Embedding(9, 4, max_norm=0.3)
        self.norm, self.b = nn.BatchNorm1d(4), Holder(second)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        x = self.first(x) + self.embedding((x[:, 0].abs() * 8).long().clamp(max=8))
        return self.last(self.b(self.norm(self.a(x))))


def facts(model, optimizer):
    """All that can be told of a program's state, as text and bits."""
    weights = [
        t.detach().clone().numpy().tobytes() for t in model.state_dict().values()
    ]
    own = optimizer.state_dict()["state"] if optimizer else {}
    state = [
        (key, name, each.tolist() if isinstance(each, torch.Tensor) else each)
        for key, values in own.items()
        for name, each in values.items()
    ]
    holders = [m.facts() for m in model.modules() if isinstance(m, Holder)]
    return holders, weights, repr(state), random_facts()


def gradients_of(model):
    return repr([p.grad is None or p.grad.tolist() for p in model.parameters()])


def random_facts():
    states = torch.get_rng_state().tolist(), random.getstate()
    return repr((*states, numpy.random.get_state()[1:]))


def made(kinds):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = Net(kinds)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def batch(step):
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(step))


def trained(kinds, steps=4, **options):
    model, optimizer = made(kinds)
    guard = OverflowGuard(model, optimizer, **options) if options else None
    losses, gradients = [], []
    for step in range(steps):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(repr(loss.item()))
        gradients.append(
            [p.grad is None or p.grad.tolist() for p in model.parameters()]
        )
        optimizer.zero_grad()
    if guard is not None:
        assert guard.coverage().failures == 0
        guard.remove()
    return losses, gradients, facts(model, optimizer)


OPTIONS = [
    {"explain": "auto"},
    {"explain": True},
    {"monitors": [LayerAudit(1)]},
    {"monitors": [MaskedOps(1)]},
    {"on_overflow": "skip"},
    {"on_overflow": "warn"},
    {"watch": "tripwire"},
]


@pytest.mark.parametrize("seed", range(5))
def test_clean_steps_are_those_without_a_guard(seed):
    expected = trained(some(seed))
    for options in OPTIONS:
        assert trained(some(seed), **options) == expected, options


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_alone(kind):
    expected = trained([[kind], []], steps=2)
    for options in ({"monitors": [MaskedOps(1)]}, {"monitors": [LayerAudit(1)]}):
        assert trained([[kind], []], steps=2, **options) == expected, options


def bad_step(kinds, policy, explain, steps=2, runs=False):
    """Makes some steps and a bad one; returns the state before it, and after it."""
    model, optimizer = made(kinds)
    guard = OverflowGuard(model, optimizer, policy, explain=explain)
    for step in range(steps):
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = facts(model, optimizer)
    x = batch(steps)

    def loss():
        return (model(x).mean() - 1e9).sqrt()

    (guard.run(loss) if runs else loss()).backward()
    if policy == "raise":
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
        explanation = error.value.report.explanation
    else:
        optimizer.step()
        explanation = guard.last_report.explanation
    after = facts(model, optimizer)
    gradients = gradients_of(model)
    guard.remove()
    return before, after, gradients, explanation


@pytest.mark.slow
@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_an_explanation_leaves_no_trace(seed, runs):
    policy = ("skip", "raise", "warn")[(seed + runs) % 3]  # what comes behind it
    plain = bad_step(some(seed), policy, False, runs=runs)
    explained = bad_step(some(seed), policy, True, runs=runs)
    assert explained[3] is not None and (explained[3].replays or not runs)
    assert explained[1:3] == plain[1:3]


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("seed", range(6))
def test_weights_optimizer_state_and_buffers_are_those_of_before(seed, policy):
    before, after, _, _ = bad_step(some(seed), policy, "auto")
    assert after[1:3] == before[1:3]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_self_test_comparison_and_advice_leave_no_trace(seed):
    model, optimizer = made(some(seed))
    twin, _ = made(some(seed))
    model(batch(0)).mean().backward()
    twin(batch(0))
    optimizer.step()
    gc.collect()
    before, gradients = facts(model, optimizer), [p.grad for p in model.parameters()]
    for run in (
        lambda: OverflowGuard(model, optimizer).self_test(batch(1), max_layers=2),
        lambda: compare_live(model, twin, batch(1)),
        lambda: advise_precision(model, [batch(1)]),
    ):
        run()
        assert facts(model, optimizer) == before
        now = [p.grad for p in model.parameters()]
        assert all(a is b for a, b in zip(gradients, now, strict=True))


class Loop:
    """A program's own trainer: it holds the model, and counts what it does."""

    def __init__(self):
        self.model = nn.Linear(4, 1)
        self.calls_here, self.losses, self.table = 0, [], {"n": 0}
        self.draws, self.total = random.Random(0), torch.zeros(())
        self.loaders = {"train": iter([1, 2])}  # no data of the loss's

    def loss(self, x):
        self.calls_here += 1
        self.losses.append(1)
        self.table["n"] += 1
        self.draws.random()
        self.total += 1
        return self.model(x).mean()

    def __call__(self, x):
        return self.loss(x)

    def facts(self):
        own = self.calls_here, self.losses, self.table, float(self.total)
        return repr((own, self.draws.getstate()))


LOSSES = {
    "lambda": lambda loop, x: lambda: loop.loss(x),
    "partial": lambda loop, x: functools.partial(loop.loss, x),
    "callable": lambda loop, x: functools.partial(loop, x),
}


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("kind", LOSSES)
def test_an_explanation_leaves_no_trace_in_the_programs_own_loop(kind, explain):
    loop, other = Loop(), Loop()
    other.loss(torch.zeros(1, 4))
    expected = other.facts()
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    guard = OverflowGuard(loop.model, optimizer, "skip", explain=explain)
    guard.run(LOSSES[kind](loop, torch.full((3, 4), NAN))).backward()
    optimizer.step()
    found = guard.last_report.explanation
    assert (found is not None) == explain
    assert not explain or not any("not put back" in note for note in found.notes)
    assert loop.facts() == expected
    guard.remove()
