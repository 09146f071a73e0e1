"""What modules keep, and is non-finite, is named beside the code that read it."""

import math

import pytest
import torch
from guarding import report_from
from pairs import pairs
from torch import nn
from torch.func import functional_call

from overflow_fast import OverflowGuard

INF, NAN = math.inf, math.nan


class Adds(nn.Module):
    """Adds a value of its own between the calls of two submodules."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        value = torch.full((6,), 0.5)
        if kind in ("trainable", "frozen"):
            self.pos = nn.Parameter(value, requires_grad=kind == "trainable")
        elif kind == "buffer":
            self.register_buffer("pos", value)
        else:
            self.pos = value

    def forward(self, x):
        return self.b(self.a(x) + self.pos)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.block, self.head = Adds(kind), nn.Linear(6, 1)

    def forward(self, x):
        return self.head(self.block(x))


def make(kind, where):
    torch.manual_seed(0)
    net = Adds(kind) if where == "root" else Net(kind)
    return net, (net if where == "root" else net.block)


def x():
    return torch.ones(2, 6)


def report_of(net, spoil, explain=False, clean_steps=0, loss_of=None, **arguments):
    """The report of a step that something was done before; of a clean one, none."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    with OverflowGuard(net, optimizer, explain=explain, **arguments) as guard:
        for step in range(clean_steps + 1):
            optimizer.zero_grad()
            if step == clean_steps:
                spoil(net)
            loss = (loss_of or (lambda net: net(x()).mean()))(net)
            loss.backward()
            if step < clean_steps:
                optimizer.step()
        report = report_from(optimizer.step)
        guard.disable()
    return report


def claims_no_code(report):
    """The report does not say that code alone has made the value."""
    verdict = report.verdict
    return verdict.origin.how in ("unclear", "given") and "produced it." not in str(
        report
    )


SEE_FORWARDS = [
    None,
    ("activations",),
    ("activations", "weights"),
    ("gradients", "loss"),
    "tripwire",
]
WATCHES = [*SEE_FORWARDS, ("gradients",)]
KINDS = ("trainable", "frozen", "buffer", "attribute")
WHERE = ("root", "inner")


@pytest.mark.parametrize(
    "kind, where, watch, clean_steps, value",
    pairs(KINDS, WHERE, WATCHES, (0, 2), (NAN, INF)),
)
def test_a_bad_value_that_a_module_keeps_is_named(
    kind, where, watch, clean_steps, value
):
    net, owner = make(kind, where)
    name = "pos" if where == "root" else "block.pos"
    report = report_of(
        net,
        lambda _: owner.pos.data.fill_(value),
        clean_steps=clean_steps,
        **({} if watch is None else {"watch": watch}),
    )
    assert claims_no_code(report), report
    verdict = report.verdict
    is_first = verdict.first.kind == "weight" and verdict.first.label == name
    assert is_first or verdict.origin.nonfinite_state == [name]
    assert name in report.answer()
    candidates = [str(each) for each in verdict.origin.candidates]
    owners = {"root": "the model", "inner": "block"}
    assert (owners[where] if kind == "attribute" else name) in candidates


@pytest.mark.parametrize("kind, where, watch", pairs(KINDS, WHERE, SEE_FORWARDS))
@pytest.mark.explains
def test_the_replay_and_the_hooks_do_not_contradict_each_other(kind, where, watch):
    net, owner = make(kind, where)
    report = report_of(
        net,
        lambda _: owner.pos.data.fill_(NAN),
        explain="auto",
        **({} if watch is None else {"watch": watch}),
    )
    assert report.explanation.cause == "bad weights"
    assert report.explanation.tensor == ("pos" if where == "root" else "block.pos")
    assert claims_no_code(report), report


@pytest.mark.parametrize("explain", [False, "auto"])
@pytest.mark.parametrize("arguments", [{"watch": ("activations",)}, {"exclude": ["b"]}])
@pytest.mark.explains
def test_a_weight_of_a_layer_that_was_not_checked_is_named(arguments, explain, as_kept):
    net, _ = make("buffer", "root")
    report = report_of(
        net, lambda net: net.b.weight.data.fill_(NAN), explain=explain, **arguments
    )
    assert report.verdict.origin.nonfinite_state == ["b.weight"]
    as_kept(report.verdict.origin.maker)
    assert claims_no_code(report)


def test_a_layer_of_torch_is_not_said_to_read_anothers_weights():
    net, _ = make("frozen", "inner")

    def spoil(net):
        net.block.a.weight.data.fill_(NAN)
        net.head.weight.data.fill_(NAN)

    verdict = report_of(net, spoil, watch=("activations",)).verdict
    assert verdict.origin.candidates == ["block.a", "block.a.weight"]


def test_what_a_later_call_has_made_bad_is_no_candidate():
    """A codebook, which its own forward writes to, is bad because its input was."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(6), requires_grad=False)

        def forward(self, x):
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
            return x - self.mean

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(6, 6), 1.0
            self.codebook, self.last = Codebook(), nn.Linear(6, 1)

        def forward(self, x):
            return self.last(self.codebook(self.first(x) / self.scale - self.scale))

    def spoil(net):
        net.scale = torch.zeros(())

    verdict = report_of(Root(), spoil, clean_steps=1).verdict
    assert verdict.origin.candidates == ["the model"]
    assert verdict.origin.nonfinite_state == []


@pytest.mark.parametrize("value", [-INF, 0.0])
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_mask_is_no_candidate(kind, value):
    class Masked(Adds):
        def forward(self, x):
            return self.b((self.a(x) * 0).log() * self.scale)

    net = Masked(kind)
    net.scale = 1.0
    net.pos[0] = value
    verdict = report_of(net, lambda net: setattr(net, "scale", 0.0)).verdict
    assert verdict.origin.nonfinite_state == []
    assert verdict.origin.candidates == ["the model"]


# Tensors that stand in for weights, for one call.


def stands_in(requires_grad, name):
    value = torch.full((6,), NAN, requires_grad=requires_grad)
    return lambda net: functional_call(net, {name: value}, (x(),)).mean()


@pytest.mark.parametrize(
    "kind, where, watch, explain",
    pairs(("trainable", "frozen"), WHERE, SEE_FORWARDS, (False, "auto")),
)
@pytest.mark.explains
def test_a_tensor_that_stands_in_for_a_weight_is_a_candidate(
    kind, where, watch, explain, as_kept
):
    net, _ = make(kind, where)
    name = "pos" if where == "root" else "block.pos"
    report = report_of(
        net,
        lambda _: None,
        explain,
        loss_of=stands_in(kind == "trainable", name),
        **({} if watch is None else {"watch": watch}),
    )
    assert claims_no_code(report), report
    candidates = [str(each) for each in report.verdict.origin.candidates]
    assert name in candidates or "a tensor in the place of a weight" in candidates
    if explain:
        assert report.explanation.cause == "unknown"
        assert "functional_call()" in " ".join(report.explanation.notes)
    if watch == "tripwire":
        as_kept(report.notes)


@pytest.mark.explains
def test_a_function_that_stands_tensors_in_is_run_again_with_them(as_kept):
    net, _ = make("frozen", "root")
    optimizer = torch.optim.SGD(net.a.parameters(), 0.1)
    loss_of = stands_in(False, "pos")
    with OverflowGuard(net, optimizer) as guard:
        guard.run(lambda: loss_of(net)).backward()
        found = report_from(optimizer.step).explanation
    assert found.cause != "not reproducible"
    as_kept(found.evidence)


def test_a_step_after_a_functional_one_has_no_stand_ins():
    net, _ = make("frozen", "root")
    optimizer = torch.optim.SGD(net.a.parameters(), 0.1)
    with OverflowGuard(net, optimizer, explain=False, watch=("activations",)) as guard:
        functional_call(net, {"pos": torch.zeros(6)}, (x(),)).mean().backward()
        optimizer.step()
        net.scaled = net(x() * INF).mean()
        report = report_from(optimizer.step)
    assert "functional_call" not in str(report)
    assert guard.coverage().failures == 0


# State that was seen after the step.


def test_a_late_verdict_names_weights_as_they_are_now():
    net, _ = make("buffer", "root")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    arguments = {"watch": ("activations",), "sync": "lagged", "_defer": True}
    with OverflowGuard(net, optimizer, "warn", **arguments) as guard:
        net.b.weight.data.fill_(NAN)
        net(x()).mean().backward()
        optimizer.step()
    verdict = guard.last_report.verdict
    assert "b.weight" in verdict.origin.candidates
    assert "is non-finite now" in verdict.origin.maker
