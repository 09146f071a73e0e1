"""Canaries: each private API of torch is there, does its work, and may go."""

import ast
import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import overflow_fast
from overflow_fast.torch_internals import modules, registry, running, tensors

PACKAGE = Path(overflow_fast.__file__).parent
ROOM = PACKAGE / "torch_internals"
PRIVATE = re.compile(
    r"""torch\._(?!_)|torch(\.\w+)+\._(?!_)|_subclasses|_functorch
    |\.(_version|_parameters|_buffers|_modules)\b
    |\._?(forward|global|optimizer)\w*_(pre_)?hooks\b""",
    re.VERBOSE,
)


@pytest.mark.parametrize("name", registry.INTERNALS)
def test_torch_has_it(name):
    internal = registry.INTERNALS[name]
    assert registry.is_there(internal), f"torch changed {internal.api}"


@pytest.mark.parametrize("path", list(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_no_other_room_uses_a_private_api(path):
    if ROOM in path.parents:
        return
    own = {"self", "guard", "cls"}
    tree = ast.parse(path.read_text())
    texts = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).split(".")[0] not in own
    ]
    texts += [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    ]
    assert [text for text in texts if PRIVATE.search(text)] == []


def test_a_missing_one_is_said_once_and_costs_one_feature(monkeypatch, caplog):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with caplog.at_level(logging.WARNING):
        assert [running.graph_task_id() for _ in range(2)] == [-1, -1]
    (message,) = caplog.messages
    assert "torch has changed: torch._C._current_graph_task_id" in message


@pytest.mark.parametrize(
    "owner, name",
    [
        (nn.modules.batchnorm, "_NormBase"),
        (torch._C, "_current_graph_task_id"),
        (torch._C._functorch, "is_batchedtensor"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (torch._guards, "TracingContext"),
        (torch, "_foreach_copy_"),
    ],
)
def test_the_guard_works_without_it(monkeypatch, owner, name):
    monkeypatch.setattr(registry, "_missing", set())
    monkeypatch.delattr(owner, name)
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


def test_step_hooks_are_counted():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert modules.has_step_hooks(optimizer) and not modules.has_step_hooks(object())
    before = modules.num_step_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    assert modules.num_step_hooks(optimizer) == before + 1


def test_a_write_raises_the_version():
    tensor = torch.zeros(2)
    before = tensors.version_of(tensor)
    tensor.add_(1)
    assert tensors.version_of(tensor) > before


def test_transforms_and_traces_are_told():
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
    traced = []
    torch.jit.trace(
        lambda x: (traced.append(running.is_jit_tracing()), x)[1], 1 * torch.ones(1)
    )
    assert any(traced) and not running.is_jit_tracing()


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


def test_the_table_in_contributing_is_this_one():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    assert "\n".join(registry.table()) in text
