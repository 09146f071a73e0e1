"""Compiled models: the verdicts and reports of eager ones, and no graph break."""

import collections
import contextlib
import dataclasses
import functools
import io
import logging
import threading

import guarding
import pytest
import torch
import torch._dynamo.utils
from assembled import Assembled
from containers import CONTAINERS
from guarding import (
    INF,
    NAN,
    Block,
    Net,
    assert_same,
    batches,
    hooks_of,
    plant,
    state_of,
    train,
    train_step,
)
from report_texts import without_times
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import DebugUnderflowOverflow, NonFiniteError, OverflowGuard
from overflow_fast.base.tree import label_text
from overflow_fast.detector import dynamo
from overflow_fast.options import Schedule

pytestmark = [pytest.mark.xdist_group("compiled"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def fresh_counters(fresh_compiler):
    torch._dynamo.utils.counters.clear()


def eager(model, **_):
    return model


def wrapped(model, **options):
    return torch.compile(model, **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def in_a_function(model, **options):
    return torch.compile(lambda *args, **kwargs: model(*args, **kwargs), **options)


FORMS = [wrapped, in_place, in_a_function]
make = functools.partial(guarding.make, depth=1)  # to compile takes most of the time


def overflow_in(layer):
    """Lets what a layer makes overflow, which compiles nothing again as a hook does."""
    layer.weight.data.fill_(3e38)
    layer.bias.data.fill_(3e38)


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


IN_ONE_GRAPH = {"backend": "aot_eager", "fullgraph": True}
# Of what dynamo alone does: AOT sees tensors, and takes as long again.
CAPTURED = {"backend": "eager", "fullgraph": True}

# The same words as without torch.compile.


@torch.no_grad()
def detected(compile_, **options):
    """What a detector prints of a clean and a bad forward, and what it keeps."""
    model = make()[0].eval()
    detector = DebugUnderflowOverflow(model, max_frames_to_save=None)
    compiled = compile_(model, **options)
    printed = [io.StringIO(), io.StringIO()]
    for text, (x, y) in zip(printed, batches(2), strict=True):
        with contextlib.redirect_stdout(text):
            try:
                compiled(x, y=y)
            except ValueError as error:
                print(error)
        model.blocks[0].fc2.weight.data[0, 0] = INF
    frames = list(detector.frames)
    detector.remove()
    texts = [text.getvalue() for text in printed]
    return texts, frames, detector.total_calls, detector.batch_number


@pytest.mark.slow
def test_the_detectors_report_is_that_of_eager():
    compiled = detected(wrapped, fullgraph=True)
    assert compiled == detected(eager)
    clean, bad = compiled[0]
    assert "Detected inf/nan" not in clean
    assert "Detected inf/nan" in bad
    assert num_graphs() == 1


def for_good(_):
    """For what is spoiled and stays so."""
    return contextlib.nullcontext()


FAULTS = {
    "none": lambda model, data: for_good(None),
    "a gradient": lambda model, data: plant(model.blocks[0].fc1, NAN, backward=True),
    "a weight": lambda model, data: for_good(model.head.weight.data.fill_(NAN)),
    "the batch": lambda model, data: for_good(data[0][0].fill_(NAN)),
    "the loss": lambda model, data: for_good(data[0][1].fill_(INF)),
}


def guarded_reports(faults, compile_, depth=1, **options):
    """A guard's report of each fault, and how many tensors it has listed by then.

    The faults follow one another in one compiled model, each from the same weights.
    """
    if "a gradient" in faults and torch.__version__ < "2.13":
        pytest.skip("this torch gives a fault's own tensor hook a tensor of its own")
    model, optimizer = make(depth=depth)
    start, found = state_of(model, optimizer), []
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        compiled = compile_(model, **options)
        for fault in faults:
            model.load_state_dict(start["model"])
            optimizer.load_state_dict(start["optimizer"])
            data, before = batches(3), guard.last_report
            with FAULTS[fault](model, data):
                train_step(compiled, optimizer, data[0])
                report = guard.last_report
                train_step(compiled, optimizer, data[1])
                graphs = num_graphs()
                with torch._dynamo.config.patch(error_on_recompile=True):
                    train_step(compiled, optimizer, data[2])
            assert num_graphs() == graphs
            assert (report is before) is (fault == "none")
            found.append((without_times(report), guard.coverage().tensors_listed))
    assert not torch._dynamo.utils.counters["graph_break"]
    return found


# How the root is called matters to what it is given and returns. A fault that is no
# hook and no attribute compiles nothing again. Two blocks are of one class.
@pytest.mark.slow
@pytest.mark.parametrize(
    "form, depth", [(wrapped, 2), (in_place, 1), (in_a_function, 1)]
)
def test_the_guards_report_is_that_of_eager(form, depth):
    faults = ["none", "the batch", "the loss", "a weight"]
    compiled = guarded_reports(faults, form, depth, **IN_ONE_GRAPH)
    graphs = num_graphs()
    assert compiled == guarded_reports(faults, eager, depth)
    assert graphs == 1


@pytest.mark.slow
def test_the_guards_report_is_that_of_eager_on_inductor():
    compiled = guarded_reports(["a gradient"], wrapped, fullgraph=True)
    assert compiled == guarded_reports(["a gradient"], eager)


@dataclasses.dataclass
class Result:
    first: torch.Tensor
    rest: list
    none: torch.Tensor | None = None


class Nested(Assembled):
    """Takes and returns whatever a module may."""

    def forward(self, x, mask=None):
        result = self.inner(
            x, [x, {"k": x * 2, 3: None}], None, 7, mask=mask, n=3, e={}
        )
        return self.same(result.first), (result.rest[0], (result.rest[1]["a"],)), 5


class Inner(Assembled):
    def forward(self, x, parts, nothing, number, mask=None, n=0, e=None):
        hidden = self.linear(x + parts[0])
        hidden = self.act(hidden) + n
        if mask is not None:
            hidden = hidden.masked_fill(mask == -INF, 0.0)
        return Result(hidden, [parts[1]["k"], {"a": hidden.sum(), "b": "text"}])


@pytest.mark.slow
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("lists_kwargs", [False, True])
def test_any_nesting_is_listed_as_in_eager(is_strict, lists_kwargs):
    def frames(compile_, **options):
        torch.manual_seed(0)
        model = Nested(
            inner=Inner(linear=nn.Linear(4, 4), act=nn.ReLU(inplace=True)),
            same=nn.Identity(),
        )
        detector = DebugUnderflowOverflow(
            model, strict_compat=is_strict, list_kwargs=lists_kwargs
        )
        mask = torch.tensor([0.0, -INF, 0.0, 0.0])
        compile_(model, **options)(torch.ones(2, 4), mask=mask)
        return list(detector.frames)

    assert frames(in_place, **CAPTURED) == frames(eager)


class Made(nn.Module):
    """Takes a kind of container, and makes one."""

    def __init__(self, kind):
        super().__init__()
        self.container = CONTAINERS[kind]

    def forward(self, value, extra=None):
        return self.container.make(self.container.get(value) * 2)


class Passing(nn.Module):
    """Hands containers on: one from outside, one that it has made."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.container = Made(kind), CONTAINERS[kind]

    def forward(self, value, x):
        output = self.inner(value, extra=self.container.make(x + 1))
        return output, self.container.get(output) + 1


def entries_of(kind, compile_, **options):
    """The labels of a step's entries with their stats, and what was opaque."""
    model, x = Passing(kind), torch.ones(3)
    with DebugUnderflowOverflow(model) as detector:
        compile_(model, **options)(CONTAINERS[kind].make(x), x)
        recorder = detector.recorder
        entries = [
            (
                label_text(entry.label),
                entry.only_if_bad,
                entry.stat and entry.stat.abs_max,
            )
            for frame in recorder.history()
            for entry in recorder.entries(frame)
        ]
        return entries, detector.coverage.opaque


# Dynamo cannot trace these without us, or makes no graph of them.
UNTRACED = {
    *("own list", "frozen attrs", "frozen slots attrs", "only registered"),
    *("namespace", "graph", "beside a list", "beside a deque"),
}
# Objects that do not declare what they hold.
CLOSED = {
    *("renaming Mapping", "mappingproxy", "registered", "object", "slots object"),
    *("like a graph", "cyclic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(CONTAINERS) - UNTRACED - CLOSED))
def test_each_kind_of_container_is_listed_as_in_eager(kind):
    compiled = entries_of(kind, in_place, **CAPTURED)
    assert compiled == entries_of(kind, eager)
    assert compiled[1] == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CLOSED))
def test_objects_that_do_not_declare_what_they_hold_count_as_unseen(kind):
    entries, opaque = entries_of(kind, in_place, **CAPTURED)
    path = CONTAINERS[kind].path
    # The compiled module's inputs and output; the root's frame is recorded eagerly.
    assert entries[:2] == [("input[0]", False, None), ("output", False, None)]
    assert any(label.endswith(path) for label, *_ in entries[2:])
    [(name, count)] = opaque.items()
    assert name.endswith(" (in compiled code)")
    assert count == 3


@pytest.mark.parametrize("kind", ["object", "dataclass"])
def test_objects_that_change_are_not_compiled_for_anew(kind):
    model = nn.Sequential(Made(kind))
    value = CONTAINERS[kind].make(torch.ones(3))
    with OverflowGuard(model, None, "warn") as guard:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for i in range(4):
            if kind == "object":
                value.history = list(range(i))
                setattr(value, f"new{i}", i)
            value.x = torch.ones(3) * i
            compiled(value)
        assert guard.coverage().failures == 0
    assert num_graphs() == 1


@pytest.mark.parametrize("depth", [15, 17])
def test_what_is_nested_too_deep_is_counted_in_compiled_code(depth):
    class Nests(nn.Module):
        def forward(self, x):
            for _ in range(depth):
                x = [x]
            return x

    model = nn.Sequential(Nests())
    with DebugUnderflowOverflow(model) as detector:
        torch.compile(model, **CAPTURED)(torch.ones(1))
        opaque = detector.coverage.opaque
    assert opaque == ({"list (nested too deep)": 2} if depth == 17 else {})


def test_attributes_beside_the_items_of_a_dict_are_listed_only_if_bad(as_kept):
    class Beside(collections.UserDict):
        pass

    class Makes(nn.Module):
        def forward(self, x):
            made = Beside(x=x, keys=[("a", 1)])
            made.data[("a", 1)] = x + 1
            made.beside = [x / 0]
            return made

    def frames(compile_, **options):
        model = nn.Sequential(Makes())
        with OverflowGuard(model, None, "warn", explain=False) as guard:
            compile_(model, **options)(torch.ones(2))
            report = guard.check()
            return report.verdict.first.label, "\n".join(report.frames)

    compiled = frames(in_place, **IN_ONE_GRAPH)
    assert compiled == frames(eager)
    assert compiled[0] == "output.beside[0]"
    as_kept(compiled[1])


def test_a_tensor_that_is_written_to_is_scanned_again():
    def frames(compile_, **options):
        model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU(inplace=True))
        nn.init.constant_(model[0].weight, -1.0)
        nn.init.zeros_(model[0].bias)
        detector = DebugUnderflowOverflow(model)
        with torch.no_grad():
            compile_(model, **options)(torch.ones(1, 2))
        return list(detector.frames)

    compiled = frames(wrapped, backend="aot_eager", fullgraph=True)
    assert compiled == frames(eager)
    assert "0.00e+00 0.00e+00 output" in compiled[2]


class Scale(nn.Module):
    def forward(self, x):
        return x * 2 + 1


@pytest.mark.slow
@torch.no_grad()
def test_memory_that_compiled_code_uses_again_is_scanned_again():
    def frames(compile_, **options):
        model = nn.Sequential(*(Scale() for _ in range(6)))
        detector = DebugUnderflowOverflow(model)
        compile_(model, **options)(torch.ones(64, 64))
        return list(detector.frames)

    assert frames(wrapped, fullgraph=True) == frames(eager)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_from_outside_is_that_of_the_module_within(form):
    """The root returns what its head made: eager mode lists that gradient once."""

    def report(compile_, **options):
        model, optimizer = make(depth=0)
        compiled = compile_(model, **options)
        x, y = batches(1)[0]
        with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
            out = compiled(x, y=y)["out"]
            (out * torch.full_like(out, INF)).sum().backward()
            optimizer.step()
        return without_times(guard.last_report), guard.last_report.verdict

    text, verdict = report(form, backend="aot_eager", fullgraph=True)
    assert (verdict.first.kind, verdict.first.fqn) == ("grad_output", "head")
    if form is not in_a_function:  # that has zeros for the gradient of the loss
        assert (text, verdict) == report(eager)


@pytest.mark.slow
def test_dynamic_shapes(model, optimizer):
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        compiled = torch.compile(model, **IN_ONE_GRAPH, dynamic=True)
        train_step(compiled, optimizer, (torch.randn(2, 8), torch.ones(2, 1)))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for size in (3, 4):
                batch = torch.randn(size, 8), torch.ones(size, 1)
                train_step(compiled, optimizer, batch)
            overflow_in(model.blocks[0].fc1)
            train_step(compiled, optimizer, (torch.ones(5, 8), torch.ones(5, 1)))
    assert guard.last_report.verdict.origin.maker == "blocks.0.fc1"


# What is compiled, and when.


@pytest.mark.parametrize("form", [wrapped, in_place])
def test_blocks_that_are_compiled_share_their_graph(form):
    """Twelve blocks, more than dynamo's limit of recompilations."""
    model, optimizer = make(depth=12)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = form(block, **CAPTURED)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        train(model, optimizer, batches(2))
        graphs = num_graphs()
        assert graphs <= 3
        last = [b for b in model.modules() if isinstance(b, Block)][10]
        last.fc2.weight.data.fill_(INF)
        train_step(model, optimizer, batches(1)[0])
        assert num_graphs() == graphs
    assert guard.last_report.verdict.first.fqn == "blocks.10.fc2.weight"


def test_a_block_that_is_compiled_after_attaching(model, optimizer):
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        with plant(model.blocks[0].fc1, INF):
            train_step(model, optimizer, batches(1)[0])
    assert guard.last_report.verdict.origin.maker == "blocks.0.fc1"


def test_a_compiled_submodule_called_on_its_own_is_a_step():
    def frames(compile_, **options):
        model, _ = make()
        detector = DebugUnderflowOverflow(model)
        block = compile_(model.blocks[0], **options)
        for _ in range(2):
            block(torch.ones(1, 8))
        return list(detector.frames)

    for form in FORMS:
        assert frames(form, **CAPTURED) == frames(eager)


@pytest.fixture
def no_other_hooks():
    """Takes off what other tests have left: code compiled meanwhile notices hooks."""
    for owner in list(dynamo._owners):
        owner.remove()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_hooks_that_come_late_take_effect(form, caplog, no_other_hooks, as_kept):
    model, optimizer = make()
    compiled = form(model, backend="eager")
    x, y = batches(1)[0]
    compiled(x, y=y)
    with caplog.at_level(logging.INFO, "overflow_fast"):
        guard = OverflowGuard(model, optimizer, "warn", explain=False)
    as_kept(caplog.messages)
    with plant(model.blocks[0].fc1, INF):
        train_step(compiled, optimizer, (x, y))
    assert guard.last_report.verdict.origin.maker == "blocks.0.fc1"
    guard.remove()
    calls = guard.coverage().tensors_listed
    compiled(x, y=y)
    assert hooks_of(model, optimizer) == 0
    assert guard.coverage().tensors_listed == calls


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule(2), Schedule(warmup=1)], ids=str)
def test_steps_that_are_not_watched_compile_nothing_again(model, optimizer, schedule):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    options = {"schedule": schedule, "explain": False}
    with OverflowGuard(model, optimizer, "warn", **options) as guard:
        train(compiled, optimizer, batches(6))
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(compiled, optimizer, batches(6))
        coverage = guard.coverage()
        assert 0 < coverage.steps_watched <= coverage.steps
        while guard.coverage().steps % 2 or schedule.warmup:
            train(compiled, optimizer, batches(1))
            if schedule.warmup:
                break
        overflow_in(model.head)
        train_step(compiled, optimizer, batches(1)[0])
    assert guard.last_report.verdict.origin.maker == "head"


@pytest.mark.slow
def test_a_step_that_is_not_watched_is_not_recorded(model, optimizer):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with OverflowGuard(model, optimizer, "warn", schedule=2) as guard:
        train(compiled, optimizer, batches(3))
        with plant(model.head, INF):
            train_step(compiled, optimizer, batches(1)[0])
        assert guard.last_report is None
        listed = guard.coverage().tensors_listed
        compiled(batches(1)[0][0], y=torch.zeros(4, 1))
        assert guard.coverage().tensors_listed > listed


def test_a_cadence_leaves_alone_what_else_is_compiled(monkeypatch, no_other_hooks):
    """An eager model is watched, and something else in the process is compiled."""
    torch.compile(torch.sin, backend="aot_eager")(torch.ones(2))
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset_code_caches", lambda: resets.append(1))
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn", schedule=2) as guard:
        train(model, optimizer, batches(6))
        assert guard.coverage().steps_watched == 3
    assert len(resets) == 1  # as it is switched on
    assert hooks_of(model, optimizer) == 0


@pytest.mark.slow
def test_two_watches_of_one_model(model, optimizer):
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    detector = DebugUnderflowOverflow(model, max_frames_to_save=None)
    with OverflowGuard(model, optimizer, "warn", watch=["activations"]) as guard:
        train(compiled, optimizer, batches(1))
        listed = guard.coverage().tensors_listed
    assert guard.coverage().not_scanned == {}
    detector.remove()
    alone, _ = make()
    other = DebugUnderflowOverflow(alone, max_frames_to_save=None)
    x, y = batches(1)[0]
    alone(x, y=y)
    assert list(detector.frames) == list(other.frames)
    assert listed == other.coverage.tensors_listed - len(list(alone.parameters()))


# It changes nothing.


@pytest.mark.slow
def test_training_is_the_same_in_every_bit():
    def result(is_watched):
        torch._dynamo.reset()
        model, optimizer = make()
        guard = OverflowGuard(model, optimizer) if is_watched else None
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        losses = train(compiled, optimizer, batches(4))
        if guard:
            guard.remove()
        return losses, state_of(model, optimizer), torch.get_rng_state()

    assert_same(result(True), result(False))


@pytest.mark.slow
def test_an_exception_in_a_compiled_forward_ends_its_step():
    class Picky(Net):
        def forward(self, x, y=None):
            if x.shape[0] == 3:
                raise KeyError("three")
            return super().forward(x, y)

    torch.manual_seed(0)
    model = Picky(depth=0)
    detector = DebugUnderflowOverflow(model)
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2, 8), y=torch.ones(2, 1))
    with pytest.raises(KeyError):
        compiled(torch.ones(3, 8), y=torch.ones(3, 1))
    compiled(torch.ones(2, 8), y=torch.ones(2, 1))
    assert "batch number=2" in "\n".join(detector.frames)


@pytest.mark.slow
def test_a_guard_raises_and_skips_as_in_eager(model, optimizer):
    compiled = wrapped(model, **CAPTURED)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        train(compiled, optimizer, batches(2))
        before = state_of(model, optimizer)
        with plant(model.blocks[0].act, INF):
            train_step(compiled, optimizer, batches(1)[0])
        assert guard.num_skipped == 1
        assert_same(state_of(model, optimizer), before)
    with OverflowGuard(model, optimizer, explain=False) as guard:
        with pytest.raises(NonFiniteError, match=r"blocks\.0\.act"):
            with plant(model.blocks[0].act, INF):
                train_step(compiled, optimizer, batches(1)[0])


@pytest.mark.slow
def test_evidence_of_a_compiled_step(model, optimizer, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    compiled = in_place(model, backend="eager")
    with OverflowGuard(model, optimizer, "warn", evidence=tmp_path, explain=False):
        with plant(model.blocks[0].fc1, INF):
            train_step(compiled, optimizer, batches(1)[0])
    (file,) = tmp_path.glob("overflow_fast/*/step-00000000/tensors.safetensors")
    tensors = load_file(file)
    assert any(tensor.isinf().any() for tensor in tensors.values())


class Checkpointed(Net):
    def forward(self, x, y=None):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return {"loss": ((self.head(x) - y) ** 2).mean()}


@pytest.mark.slow
def test_checkpointing_in_compiled_code():
    def report(compile_, **options):
        torch.manual_seed(0)
        model = Checkpointed(depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
            compiled = compile_(model, **options)
            with plant(model.blocks[0].fc1, INF):
                train_step(compiled, optimizer, batches(1)[0])
        return guard.last_report.verdict.origin.maker, guard.coverage().tensors_listed

    maker, listed = report(wrapped, backend="aot_eager", fullgraph=True)
    assert maker == "blocks.0.fc1"
    # Nothing is listed twice, as what eager mode computes again is.
    assert listed < report(eager)[1]


@pytest.mark.slow
def test_a_compiled_block_that_is_checkpointed():
    torch.manual_seed(0)
    model = Checkpointed(depth=2)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    detector = DebugUnderflowOverflow(model, max_frames_to_save=None)
    x, y = batches(1)[0]
    model(x, y=y)["loss"].backward()
    frames = list(detector.frames)
    # Checkpointing stops once it has what backward needs.
    assert sum("(recomputed)" in frame for frame in frames) == 2 * 3
    assert detector.batch_number == 1


@pytest.mark.slow
def test_threads_run_compiled_code(model, optimizer):
    model.eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with OverflowGuard(model, optimizer, "warn") as guard, torch.no_grad():
        x, y = batches(1)[0]
        compiled(x, y=y)

        @torch.no_grad()  # each thread has a grad mode of its own
        def run():
            for _ in range(20):
                compiled(x, y=y)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert guard.last_report is None
        assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_exported_model_has_no_trace_of_its_watch(model, is_strict):
    model.eval()
    x, y = batches(1)[0]
    expected = model(x, y=y)
    detector = DebugUnderflowOverflow(model)
    program = torch.export.export(model, (x,), {"y": y}, strict=is_strict)
    assert "overflow_fast" not in str(program.graph)
    found = program.module()(x, y=y)
    assert_same(found["out"].detach(), expected["out"].detach())
    detector.remove()


class Sum(Assembled):
    """Its submodules' outputs have one gradient."""

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_a_gradient_of_two_outputs_is_scanned_once():
    model = Sum(a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    compiled = in_a_function(model, backend="aot_eager", fullgraph=True)
    watch = ["activations", "grad_outputs"]
    with OverflowGuard(model, on_overflow="warn", watch=watch) as guard:
        for steps in (1, 2):
            compiled(torch.ones(4, 8)).pow(2).sum().backward()
            coverage = guard.coverage()
            assert coverage.tensors_listed == (6 + 3) * steps
            assert coverage.tensors_scanned == (4 + 1) * steps


class Between(Assembled):
    """Makes a nan between the calls of its submodules."""

    def forward(self, x):
        return self.b(torch.log(self.a(x) * 0 + x))


@pytest.mark.parametrize("form", [eager, wrapped, in_place])
@pytest.mark.parametrize("is_warm", [False, True])
def test_who_made_it_is_known_through_a_wrapper(form, is_warm, as_kept):
    model = Between(a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = form(model, backend="eager")
    with OverflowGuard(compiled, optimizer, "warn", explain=False) as guard:
        for value in (1.0, -1.0) if is_warm else (-1.0,):
            compiled(torch.full((4, 8), value)).sum().backward()
            optimizer.step()
    verdict = guard.last_report.verdict
    assert verdict.origin.how == "passed_on"
    as_kept(verdict.origin.maker)
