"""A watched model exports, and is traced, as if nobody watched it."""

import pytest
import torch
from guarding import batches, make
from torch.fx.experimental.proxy_tensor import make_fx

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

pytestmark = [pytest.mark.xdist_group("compiled"), pytest.mark.filterwarnings("ignore")]

WATCHES = [DebugUnderflowOverflow, lambda model: OverflowGuard(model, None, "warn")]
X, Y = batches(1)[0]


def exported(model, is_strict):
    program = torch.export.export(model, (X,), {"y": Y}, strict=is_strict)
    nodes = [(node.op, node.name, str(node.target)) for node in program.graph.nodes]
    return (
        nodes,
        str(program.graph_signature),
        sorted(program.constants),
        sorted(name for name, _ in program.graph_module.named_modules()),
    )


def run_as_fx(model):
    graph = make_fx(lambda x: model(x, y=Y)["loss"])(X).graph
    return [(node.op, node.name, str(node.target)) for node in graph.nodes]


def run_pre_dispatch(model):
    graph = make_fx(lambda x: model(x, y=Y)["loss"], pre_dispatch=True)(X).graph
    return [(node.op, node.name, str(node.target)) for node in graph.nodes]


def scripted(model):
    graph = torch.jit.trace(model, (X, Y), strict=False).inlined_graph
    return [node.kind() for node in graph.nodes()]


FORMS = {
    "strict": lambda model: exported(model, True),
    "not strict": lambda model: exported(model, False),
    "make_fx": run_as_fx,
    "make_fx, before dispatch": run_pre_dispatch,
    "torch.jit.trace": scripted,
}


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_what_comes_out_is_the_same(form, with_grad):
    found = []
    for watches in ([], WATCHES):
        torch._dynamo.reset()
        model = make(depth=1)[0].eval()
        watchers = [watch(model) for watch in watches]
        with torch.set_grad_enabled(with_grad):
            found.append(FORMS[form](model))
        for watcher in watchers:
            watcher.remove()
    assert found[1] == found[0]


def test_an_export_counts_nothing_and_a_step_after_it_is_watched():
    model = make(depth=1)[0].eval()
    with OverflowGuard(model, None, "warn") as guard:
        torch.export.export(model, (X,), {"y": Y})
        assert guard.coverage().tensors_listed == 0
        assert guard.coverage().not_scanned == {}
        model.head.weight.data.fill_(float("inf"))
        model(X, y=Y)  # of a model in evaluation: a request
        assert guard.last_report.verdict.first.fqn == "head.weight"
        model.train()
        model(X, y=Y)["loss"].backward()
        assert guard.check().verdict.first.fqn == "head.weight"


def test_a_trace_that_somebody_may_run_is_counted(as_kept):
    model = make(depth=1)[0].eval()
    with OverflowGuard(model, None, "warn") as guard:
        run_as_fx(model)
        as_kept(list(guard.coverage().not_scanned))


@pytest.mark.parametrize("watch", WATCHES)
def test_hooks_stand_in_one_order(watch):
    """Compilers of torch 2.10 and 2.11 go by that of the dict, modules by the other."""
    model = make(depth=1)[0]
    watcher = watch(model)
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            assert list(dict.keys(hooks)) == list(hooks)
    watcher.remove()
