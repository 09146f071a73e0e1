"""Compiled code with bodies of its own, or in parts; several watches; a last step."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from assembled import Assembled
from guarding import batches, make
from report_texts import without_times
from torch import nn
from torch._higher_order_ops.map import map as map_
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from overflow_fast import DebugUnderflowOverflow, OverflowGuard
from overflow_fast.detector import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled"),
    pytest.mark.filterwarnings("ignore"),
]

BODIES = {
    "torch.cond": (
        lambda f, x: torch.cond(x.sum() > 0, lambda t: f(t), lambda t: -f(t), (x,)),
        2,
    ),
    "torch.while_loop": (
        lambda f, x: while_loop(
            lambda i, t: i < 2, lambda i, t: (i + 1, f(t)), (torch.tensor(0), x)
        )[1],
        1,
    ),
    "scan": (lambda f, x: scan(lambda c, t: (f(c) + t, c * 2), x[0], x)[1], 1),
    "map": (lambda f, x: map_(lambda t: f(t), x), 1),
}


class Around(nn.Module):
    """Calls a layer in a body, between two others."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.before, self.inner, self.after = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.after(self.body(self.inner, self.before(x)))


def outcome(model, watch, is_compiled=True, backward=True, **options):
    """The output and all gradients, and what was looked at."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    guard = watch(model)
    options = {"backend": "aot_eager", "fullgraph": True, **options}
    call = torch.compile(model, **options) if is_compiled else model
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.set_grad_enabled(backward):
        out = call(x)
        if backward:
            out.sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    if guard is None:
        return (out, grads), None
    guard.remove()
    return (out, grads), guard.coverage()


def same(a, b):
    pairs = zip([a[0], *a[1]], [b[0], *b[1]], strict=True)
    return all(x is y or torch.equal(x, y) for x, y in pairs)


def unwatched(model):
    return None


def watched(model):
    return OverflowGuard(model, None, "warn")


@pytest.mark.parametrize("name", BODIES)
def test_calls_in_a_body_are_counted_as_not_scanned(name):
    body, num_calls = BODIES[name]
    torch.manual_seed(0)
    model = Around(body)
    bare, _ = outcome(model, unwatched, is_compiled=False)
    for is_compiled in (True, False):
        found, coverage = outcome(model, watched, is_compiled)
        assert same(found, bare)
        assert coverage.not_scanned == {f"inside {name}": 4 * num_calls}
        # Weights, inputs and outputs of the others, and gradients of what they return.
        assert coverage.tensors_listed == 4 * num_calls + 2 * 4 + 2 + 2


def test_a_body_in_a_body():
    def body(f, x):
        inner = BODIES["torch.cond"][0]
        return checkpoint(lambda t: inner(f, t), x, use_reentrant=False)

    torch.manual_seed(0)
    model = Around(body)
    bare, _ = outcome(model, unwatched, is_compiled=False, backward=False)
    found, coverage = outcome(model, watched, backward=False)
    assert same(found, bare)
    assert coverage.not_scanned == {"inside torch.cond": 8}


def test_a_whole_model_in_a_body():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with OverflowGuard(model, None, "warn") as guard, torch.no_grad():
        torch.compile(lambda x: BODIES["torch.cond"][0](model, x), backend="aot_eager")(
            torch.ones(3, 4)
        )
        assert guard.coverage().not_scanned == {"inside torch.cond": 8}


@pytest.mark.day
@pytest.mark.parametrize(
    "bodies, why",
    [
        ([], ""),
        (["autograd.Function", "tag_activation_checkpoint"], ""),
        (["autograd.Function", "cond", "map_impl"], "inside torch.cond"),
        (["scan"], "inside scan"),
    ],
)
def test_the_first_body_that_is_closed_is_the_reason(bodies, why, monkeypatch):
    outermost = SimpleNamespace(source_target=None)
    tracers = [outermost, *(SimpleNamespace(source_target=each) for each in bodies)]
    output = SimpleNamespace(tracers=tracers)
    tx = SimpleNamespace(export=False, output=output)
    monkeypatch.setattr(compiled, "dynamo_translator", lambda: tx)
    assert compiled.step_out() == why
    assert (len(tracers) == len(bodies) + 2 and tracers[-1] is outermost) == bool(why)


class Region(Assembled):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.linear(x) + x


@pytest.mark.parametrize("watch", [watched, DebugUnderflowOverflow])
def test_compile_regions_that_are_repeated(watch):
    torch.manual_seed(0)
    model = nn.Sequential(*(Region(linear=nn.Linear(4, 4)) for _ in range(2)))
    bare, _ = outcome(model, unwatched, is_compiled=False)
    torch._dynamo.reset()
    guard = watch(model)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(
        torch.linspace(-1, 1, 12).view(3, 4)
    )
    out.sum().backward()
    assert same((out, [p.grad for p in model.parameters()]), bare)
    found = guard.coverage
    found = found() if callable(found) else found
    assert list(found.not_scanned) == ["inside nested_compile_region"]
    assert found.tensors_scanned > 0  # what the regions are given and return
    guard.remove()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])  # which has no tokens
def test_parts_of_a_model_under_ddp(backend):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        width = 512  # a layer of 1 MiB
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
        found = []
        for cap in (1, 1000):
            torch._dynamo.reset()
            net = copy.deepcopy(layers)
            model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=cap)
            with OverflowGuard(model, None, "warn", explain=False) as guard:
                compiled = torch.compile(model, backend=backend)
                compiled(torch.ones(2, width)).sum().backward()
                guard.check()
                net[2].weight.data[0, 0] = float("inf")
                compiled(torch.ones(2, width)).sum().backward()
                report = guard.check()
            text = without_times(report)
            found.append((text, guard.coverage().tensors_listed))
        assert found[0] == found[1]
        assert "2.weight" in found[0][0]
    finally:
        dist.destroy_process_group()


class Encoded(Assembled):
    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("is_inner_first", [True, False])
def test_watches_of_a_model_and_of_a_part_of_it(is_inner_first):
    def listed(is_compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Encoded(
            encoder=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
            head=nn.Linear(4, 1),
        )
        parts = [model.encoder, model][:: 1 if is_inner_first else -1]
        guards = [OverflowGuard(part, None, "warn") for part in parts]
        call = torch.compile(model, backend="aot_eager") if is_compiled else model
        call(torch.ones(2, 4))
        found = [guard.coverage() for guard in guards]
        for guard in guards:
            guard.remove()
        return [(c.tensors_listed, c.not_scanned) for c in found]

    assert listed(True) == listed(False)


def test_two_watched_models_in_one_compiled_function():
    """What one returns, the other is given."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with OverflowGuard({"a": first, "b": second}, None, "warn") as guard:
        torch.compile(lambda x: second(first(x)), backend="aot_eager")(torch.ones(2, 4))
        assert guard.coverage().not_scanned == {}


@torch.no_grad()
def test_a_model_that_is_called_twice_in_one_compiled_function():
    """Its first call is over, and its stats on their way, when the second begins."""
    model = nn.Linear(4, 4)
    detector = DebugUnderflowOverflow(model, _defer=True)
    torch.compile(lambda x: model(x) + model(x), backend="aot_eager")(torch.ones(2, 4))
    assert detector.coverage.not_scanned == {}
    detector.remove()


class Tail(Assembled):
    """Computes after its last submodule."""

    def forward(self, x):
        return self.tail(self.last(self.first(x)), x)


TAILS = {
    "nothing": lambda h, x: h,
    "the same gradient": lambda h, x: h + x,
    "times one": lambda h, x: h * torch.ones(4),
    "in place": lambda h, x: h.mul_(2),
    "a view": lambda h, x: h.t(),
    "returned and used": lambda h, x: (h, h.softmax(-1)),
    "two": lambda h, x: (h * 2, x),
}


@pytest.mark.parametrize(
    ("tail", "form"),
    [*((tail, "wrapped") for tail in TAILS), ("the same gradient", "in place")],
)
def test_a_root_that_computes_after_its_last_submodule(tail, form):
    def report(is_compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tail(first=nn.Linear(4, 4), last=nn.Linear(4, 4), tail=TAILS[tail])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = model
        if is_compiled and form == "wrapped":
            call = torch.compile(model, backend="aot_eager")
        elif is_compiled:
            model.compile(backend="aot_eager")
        with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
            out = call(torch.ones(2, 4))
            out = out[0] if isinstance(out, tuple) else out
            (out * float("inf")).sum().backward()
            optimizer.step()
        text = without_times(guard.last_report)
        return text, guard.coverage().tensors_listed

    assert report(True) == report(False)


def test_many_watched_models_share_their_code():
    """More than dynamo compiles one function for."""
    models = [make(depth=1)[0] for _ in range(10)]
    guards = [OverflowGuard(model, None, "warn") for model in models]
    for model in models:
        model.compile(backend="aot_eager", fullgraph=True)
        x, y = batches(1)[0]
        model(x, y=y)["loss"].backward()
    assert all(guard.coverage().not_scanned == {} for guard in guards)
    for guard in guards:
        guard.remove()
