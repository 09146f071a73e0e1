"""Canaries: each private API of torch is there, does its work, and may go."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch
from modes import Functions, Operators
from processes import python
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import overflow_fast
from overflow_fast import _C
from overflow_fast.detector import compiled, dynamo
from overflow_fast.guard.undo import restore_point
from overflow_fast.guard.verdict import foreign_hooks
from overflow_fast.torch_internals import (  # noqa: F401  (each adds its rows)
    cached_casts,
    call_arguments,
    clipping,
    compiled_calls,
    compiler,
    registry,
    replaying,
    running,
    scripting,
    tracing,
)
from overflow_fast.torch_internals import module_internals as modules
from overflow_fast.torch_internals import tensor_internals as tensors

PACKAGE = Path(overflow_fast.__file__).parent
ROOM = PACKAGE / "torch_internals"
PYTHON = [path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents]
PRIVATE = re.compile(
    r"""torch\._(?!_)|torch(\.\w+)+\._(?!_)|_subclasses|_functorch
    |\.(_version|_parameters|_buffers|_modules)\b
    |\._?(forward|global|optimizer)\w*_(pre_)?hooks\b""",
    re.VERBOSE,
)
# Of namedtuples, CPython, Lightning and transformers.
NOT_OF_TORCH = {
    *("_fields", "_asdict", "_getframe", "_overflow_fast_original"),
    *("_batches_that_stepped", "_should_accumulate", "_logger_connector"),
    *("_current_frames", "_exit", "_SubParsersAction", "_option_string_actions"),
    *("_overflow_check_and_loss_scale_update", "_globalstep_last_logged"),
    *("_is_owned", "_waiters", "_is_zero", "_is_mine"),  # of Python's locks
}
CSRC = PACKAGE.parent / "csrc"
CPP_ROOM = CSRC / "torch_internals"
CPP = [path for path in CSRC.rglob("*.*") if CPP_ROOM not in path.parents]
# What torch/extension.h offers, and the ABI that torch keeps stable.
CPP_PUBLIC = {"torch/csrc/utils/pybind.h", "torch/csrc/stable/c/shim.h"}
CPP_PRIVATE_HEADER = re.compile(
    r"torch/csrc/|c10/core/impl/|c10/core/DispatchKeySet"
    r"|ATen/(SequenceNumber|record_function|PythonTorchFunctionTLS)"
)
CPP_PRIVATE_NAME = re.compile(
    r"\bTHP\w+|(?:c10|at)::impl\b|torch::(?:autograd|dynamo|impl|torch_dispatch_mode)\b"
    r"|_PyType_Lookup|unsafeGet|_unsafe_|getIntrusivePtr|version_counter\b|DispatchKeySet"
)


@pytest.mark.day
@pytest.mark.parametrize("name", registry.INTERNALS)
def test_torch_has_it(name):
    internal = registry.INTERNALS[name]
    assert registry.is_there(internal), f"torch changed {internal.api}"


def names_of_others(node):
    """What a node reads of another object or imports, with dots."""
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    return [text] if text.split(".")[0] not in ("self", "guard", "cls") else []


def test_no_other_room_uses_a_private_api():
    found = [
        (path.name, text)
        for path in PYTHON
        for node in ast.walk(ast.parse(path.read_text()))
        for text in names_of_others(node)
        if PRIVATE.search(text)
    ]
    assert found == []


def private_attributes(tree):
    """Names of private attributes that are read, also by `getattr` and `hasattr`."""
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(node, ast.Call) and len(node.args) > 1:
            called, key = getattr(node.func, "id", ""), node.args[1]
            if called in ("getattr", "hasattr") and isinstance(key, ast.Constant):
                name = key.value
        if name is not None and re.match("_[a-z]", name, re.IGNORECASE):
            yield name


def defined_names(tree):
    """Names that a module defines: functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def test_private_attributes_are_of_the_package_itself():
    trees = {path: ast.parse(path.read_text()) for path in PYTHON}
    known = NOT_OF_TORCH.union(*map(defined_names, trees.values()))
    foreign = {
        (path.name, name)
        for path, tree in trees.items()
        for name in private_attributes(tree)
        if name not in known
    }
    assert foreign == set()


def test_no_other_folder_of_the_extension_uses_a_private_api():
    for path in CPP:
        text = path.read_text()
        headers = set(re.findall(r"#include <(.+)>", text)) - CPP_PUBLIC
        found = [each for each in headers if CPP_PRIVATE_HEADER.match(each)]
        assert [*found, *CPP_PRIVATE_NAME.findall(text)] == [], path


def test_the_extensions_room_uses_no_other_folder():
    listed = (PACKAGE / "torch_internals" / "README.md").read_text()
    for path in CPP_ROOM.iterdir():
        included = re.findall(r'#include "(.+)"', path.read_text())
        assert [each for each in included if not (CPP_ROOM / each).exists()] == [], path
        assert "\n| `" + path.with_suffix(".h").name + "` |" in listed


def test_a_missing_one_is_said_once_and_costs_one_feature(monkeypatch, caplog, as_kept):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(torch._C, "_get_tracing_state")
    with caplog.at_level(logging.WARNING):
        assert [running.is_jit_tracing() for _ in range(2)] == [False, False]
    (message,) = caplog.messages
    as_kept(message)


def test_what_is_called_directly_has_a_fallback(monkeypatch, caplog):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.setattr(registry, "INTERNALS", dict(registry.INTERNALS))
    known = "which forward operation's derivative runs", "Nothing works", 7
    gone = registry.direct("torch._C._no_such_function", *known)
    lost = registry.direct("torch.nn.Module._no_such_table", *known)
    with caplog.at_level(logging.WARNING):
        assert [gone(), gone(), lost(nn.Identity())] == [7, 7, 7]
    assert ["_no_such_function" in each for each in caplog.messages] == [True, False]
    assert all("Nothing works" in each for each in caplog.messages)


def test_what_is_called_directly_is_torchs_own():
    assert replaying.autograd_node is torch._C._current_autograd_node
    assert running.graph_task_id is torch._C._current_graph_task_id
    module = nn.Linear(1, 1)
    assert modules.own_parameters(module) is module._parameters
    assert modules.global_forward_hooks() is nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(
    "owner, name",
    [
        (nn.modules.batchnorm, "_NormBase"),
        (torch._C._functorch, "is_batchedtensor"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (torch._guards, "TracingContext"),
        (torch, "_foreach_copy_"),
        (nn.Module, "_wrapped_call_impl"),
        (nn.modules.dropout, "_DropoutNd"),
        (torch.fx.Interpreter, "run_node"),
    ],
)
def test_the_guard_works_without_it(monkeypatch, owner, name):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(owner, name)
    check_skip()


def test_the_guard_works_without_what_is_called_directly(monkeypatch):
    monkeypatch.setattr(restore_point, "graph_task_id", lambda: -1)
    monkeypatch.setattr(foreign_hooks, "global_forward_hooks", dict)
    check_skip()


def check_skip():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with overflow_fast.OverflowGuard(model, optimizer, on_overflow="skip") as guard:
        for value in (1.0, float("nan"), 1.0):
            model(torch.full((3, 2), value)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.coverage().failures == 0 and guard.num_skipped == 1
    assert all(each.isfinite().all() for each in model.state_dict().values())


def test_copies_go_one_by_one_where_there_is_no_kernel_for_all(monkeypatch):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(torch, "_foreach_copy_")
    target = [torch.zeros(2), torch.zeros(3)]
    tensors.copy_all(target, [torch.ones(2), torch.ones(3)])
    assert all(torch.equal(each, torch.ones_like(each)) for each in target)


# What each is used for.


def test_hooks_come_in_the_order_of_their_calls():
    module = nn.Linear(1, 1)
    hooks = [lambda *_: None, lambda *_: None]
    for hook in hooks:
        module.register_forward_hook(hook)
    assert list(modules.forward_hooks(module).values()) == hooks
    assert modules.forward_pre_hooks(module) == {}
    assert list(modules.own_parameters(module)) == ["weight", "bias"]


def test_hooks_on_several_modules_share_a_key_in_torch_2_10(monkeypatch):
    monkeypatch.setattr(modules, "_IS_2_10", True)
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = overflow_fast.OverflowGuard(model, optimizer, "warn")
    first, second = (list(modules.forward_hooks(each)) for each in model)
    assert len(first) == 1 and first == second
    guard.remove()
    for each in model:
        assert not each._forward_hooks and not each._forward_hooks_with_kwargs


def test_step_hooks_are_listed():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert modules.has_step_hooks(optimizer) and not modules.has_step_hooks(object())
    before = modules.step_pre_hooks(optimizer)
    hook = lambda *_: None  # noqa: E731
    optimizer.register_step_pre_hook(hook)
    assert modules.step_pre_hooks(optimizer) == [*before, hook]


def test_a_write_raises_the_version():
    tensor = torch.zeros(2)
    before = _C.version_of(tensor)
    tensor.add_(1)
    assert _C.version_of(tensor) > before
    with torch.inference_mode():
        assert _C.version_of(torch.zeros(2)) is None


def test_writes_to_several_tensors_are_counted():
    written, other = torch.zeros(2), torch.zeros(2)
    before = _C.versions_of([written, other])
    written.add_(1)
    after = _C.versions_of([written, other])
    assert after[0] == before[0] + 1 and after[1] == before[1]
    with torch.inference_mode():
        assert _C.versions_of([torch.zeros(2)]) == [0]
    with pytest.raises(TypeError, match="tensors"):
        _C.versions_of([1])


def test_it_is_told_which_tensors_require_gradients():
    weight = nn.Parameter(torch.zeros(2))
    assert _C.require_grad([weight, torch.zeros(2)]) == [True, False]
    weight.requires_grad_(False)
    assert _C.require_grad([weight]) == [False]


def test_tables_hold_the_very_values_in_their_order():
    one, other = torch.zeros(2), torch.zeros(2)
    tables = [{"a": one}, {}, {"b": other}]
    assert _C.hold(tables, [one, other])
    assert not _C.hold(tables, [other, one]) and not _C.hold(tables, [one])
    assert not _C.hold(tables, [one, other, one])
    tables[1]["c"] = None
    assert not _C.hold(tables, [one, other]) and _C.hold(tables, [one, None, other])


def test_transforms_and_traces_are_reported():
    seen = []

    def look(x):
        seen.append(
            (
                tensors.is_in_transform(x),
                tensors.is_batched(x),
                running.is_transforming(),
            )
        )
        return x * 2

    torch.func.vmap(look)(torch.ones(2))
    look(torch.ones(2))
    assert seen == [(True, True, True), (False, False, False)]
    in_trace = []
    torch.jit.trace(
        lambda x: (in_trace.append(running.is_jit_tracing()), x)[1], 1 * torch.ones(1)
    )
    assert any(in_trace) and not running.is_jit_tracing()


def test_the_end_of_a_backward_calls_back():
    calls = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def hook(gradient):
        calls.append(running.graph_task_id() >= 0)
        running.call_after_backward(lambda: calls.append("end"))

    y.register_hook(hook)
    y.sum().backward()
    assert calls == [True, "end"] and running.graph_task_id() == -1


def test_the_wrapped_module_is_where_it_was():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
    from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp

    inner = nn.Linear(1, 1)
    checkpointed = checkpoint_wrapper.checkpoint_wrapper(inner)
    for made in (checkpointed, torch.compile(inner), nn.DataParallel(inner)):
        assert getattr(made, modules.WRAPPED[type(made).__name__]) is inner
    known = modules.WRAPPED["FullyShardedDataParallel"]
    assert known == fsdp.FSDP_WRAPPED_MODULE


def test_a_functional_call_is_seen_from_within():
    seen = []
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_forward_hook(lambda *_: seen.append(running.is_functional_call()))
    own = dict(model.named_parameters())
    x = torch.ones(1, 1)
    torch.func.functional_call(model, own, (x,))
    torch.nn.utils.stateless._functional_call(model, own, x)
    model(x)
    assert seen == [True, True, False] and not running.is_functional_call()


def test_the_running_modules_are_found():
    inner, seen = nn.Identity(), []
    outer = nn.Sequential(inner)
    inner.register_forward_hook(lambda *_: seen.extend(running.running_modules()))
    outer(torch.ones(1))
    assert [module for _, module in seen] == [inner, outer]
    assert running.running_modules() == []


def test_the_node_that_a_graph_runs_is_found():
    seen = []

    def look(x):
        seen.extend(running.running_nodes())
        return x

    graph = torch.fx.Graph()
    node = graph.call_function(look, (graph.placeholder("x"),))
    graph.output(node)
    torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(torch.ones(1))
    assert seen == [node]


# What the extension's room is used for.


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_see_nothing_of_what_is_hidden(kind):
    with kind() as mode:
        with _C.Hidden():
            torch.ones(1).add(1)
        assert not mode.seen
        torch.ones(1)
        assert mode.seen


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_see_nothing_of_a_scan(kind):
    tensor = torch.tensor([1.0, 2.0])
    with kind() as mode:
        assert _C.scan_tensors([tensor])[0].abs_max == 2
        assert not mode.seen


def test_dynamo_leaves_python_alone_while_it_is_paused():
    eval_frame = torch._C._dynamo.eval_frame
    seen = []
    before = eval_frame.set_eval_frame(False)  # run what is compiled, compile nothing
    try:
        _C.run_paused(lambda: seen.append(eval_frame.get_eval_frame_callback()))
        seen.append(eval_frame.get_eval_frame_callback())
    finally:
        eval_frame.set_eval_frame(before)
    assert seen == [None, False]


def proxies(function):
    make_fx(function)(torch.ones(1))


def pre_dispatch(function):
    make_fx(function, pre_dispatch=True)(torch.ones(1))


def functional(function):
    with FunctionalTensorMode():
        function(torch.ones(1))


def export(function):
    module = nn.Identity()
    module.register_forward_hook(lambda *_: function(torch.ones(1)))
    torch.export.export(module, (torch.ones(1),), strict=False)


@pytest.mark.parametrize("trace", [proxies, pre_dispatch, functional, export])
def test_nothing_is_called_in_a_trace(trace):
    ran, seen = [], []

    def look(x):
        ran.append(True)
        _C.run_paused(lambda: seen.append("in a trace"))
        return x * 1

    trace(look)
    assert ran and not seen
    look(torch.ones(1))
    assert seen


class Owner:
    """Owns a frame hook, and takes down what it is asked."""

    def __init__(self, **options):
        self.recorder = _C.Recorder(None, **options)
        self.graph_tasks = []

    def on_submodule_call(self, module, graph_task):
        self.graph_tasks.append(graph_task)
        return 0


def test_the_extension_knows_which_backward_runs():
    owner = Owner()
    hook = _C.FrameHook(owner, 0)
    x = torch.ones(1, requires_grad=True)
    (x * 2).register_hook(lambda _: None)
    y = x * 2
    ids = []

    def look(gradient):
        ids.append(running.graph_task_id())
        _C.run_hook(hook, nn.Identity(), (), {}, None)

    y.register_hook(look)
    y.sum().backward()
    _C.run_hook(hook, nn.Identity(), (), {}, None)
    assert owner.graph_tasks == [*ids, -1] and ids[0] >= 0


def test_a_hook_on_a_node_sees_its_gradient():
    owner = Owner(watches_gradients=True)
    hook, x = _C.FrameHook(owner, 0), torch.ones(2, requires_grad=True)
    y = x * 2
    _C.run_hook(hook, nn.Identity(), (), {}, y)
    y.backward(torch.tensor([3.0, 4.0]))
    assert torch.equal(x.grad, torch.tensor([6.0, 8.0]))
    _, frame = owner.recorder.history()
    (entry,) = owner.recorder.entries(frame)
    assert frame.kind == _C.FrameKind.BACKWARD and entry.stat.abs_max == 4


def test_a_write_makes_a_tensor_unknown_to_the_memo():
    owner = Owner()
    hook, x = _C.FrameHook(owner, 0), torch.zeros(4096)
    for value in (1.0, 2.0):
        x.fill_(value)
        _C.run_hook(hook, nn.Identity(), (), {}, x)
    entries = map(owner.recorder.entries, owner.recorder.history())
    assert [entry.stat.abs_max for (entry,) in entries] == [1, 2]


def test_hooks_are_left_out_of_compiled_code_that_might_drop_them(monkeypatch):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(torch.library, "_register_effectful_op")
    assert not compiled.register()
    monkeypatch.setattr(dynamo, "_loaded", [])
    assert not dynamo._is_loaded()


WITHOUT_DYNAMO = """
import sys, torch, torch._dynamo, overflow_fast
del torch._C._dynamo.eval_frame.set_eval_frame
sys.modules["torch._dynamo"] = None
model = torch.nn.Linear(2, 2)
with overflow_fast.OverflowGuard(model, on_overflow="warn") as guard:
    model(torch.ones(1, 2)).sum().backward()
print(guard.coverage().failures)
"""


@pytest.mark.slow
def test_eager_code_is_watched_where_torch_compile_has_changed(as_kept):
    done = python("-c", WITHOUT_DYNAMO, cwd=PACKAGE.parent)
    assert done.stdout.strip() == "0", done.stderr
    as_kept(done.stderr)


def test_the_table_beside_the_code_is_this_one():
    text = (PACKAGE / "torch_internals" / "README.md").read_text()
    assert "\n".join(registry.table()) in text
