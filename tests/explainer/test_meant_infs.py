"""Infs that are meant: those of masks, and of what passes them on."""

import pytest
import torch
from assembled import Assembled
from torch import nn
from torch.nn.functional import cross_entropy

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer.leaves import Leaf
from overflow_fast.explainer.op_table import OpTable
from overflow_fast.explainer.op_trace import OpTrace
from overflow_fast.explainer.trace_back import trace_back
from overflow_fast.guard.report.causes import CONSTANT, UNDEFINED

INF = float("inf")
LARGE = torch.full((3, 3), 3e38)
UPPER = torch.ones(3, 3).triu(1).bool()


def mask(value=-INF):
    return torch.zeros(3, 3).masked_fill(UPPER, value)


def rows():
    """Two, with nan: one of nothing else."""
    return torch.ones(2, 3).masked_fill(torch.ones(2, 3).triu() > 0, float("nan"))


def traced(run, leaves=()):
    table = OpTable(list(leaves))
    with OpTrace({}, table):
        result = run()
    return table, result


# What is run, and the operations that make what is not meant.
CASES = {
    "a mask": (mask, []),
    "a mask that is used": (lambda: (mask() + 1).softmax(-1), []),
    "a mask of nan": (lambda: mask(float("nan")), ["aten.masked_fill.Scalar"]),
    "another sign": (lambda: mask().neg(), []),
    "a constant of another sign": (lambda: mask(INF), ["aten.masked_fill.Scalar"]),
    "a nan of a mask": (lambda: mask() * 0, ["aten.mul.Tensor"]),
    "a row that is masked": (lambda: mask().sum(-1), []),
    "an overflow beside a mask": (lambda: (LARGE + mask()) * 2, ["aten.mul.Tensor"]),
    "an overflow of a masked row": (
        lambda: (mask() - LARGE).sum(0),
        ["aten.sum.dim_IntList"],
    ),
    "a median of nothing but nan": (
        lambda: rows().nanmedian(-1).values,
        ["aten.masked_fill.Scalar", "aten.nanmedian.dim"],
    ),
    "a median of what is left": (
        lambda: rows()[1:].nanmedian(-1).values,
        ["aten.masked_fill.Scalar"],
    ),
    "a mean of nothing but nan": (
        lambda: rows().nanmean(-1),
        ["aten.masked_fill.Scalar", "aten.div.Tensor"],
    ),
    "a sum of nothing but nan": (
        lambda: rows().nansum(-1),
        ["aten.masked_fill.Scalar"],
    ),
    "the larger one of nan and nan": (
        lambda: rows().fmax(rows()),
        ["aten.masked_fill.Scalar", "aten.masked_fill.Scalar", "aten.fmax"],
    ),
    "an overflow beside what is left out": (
        lambda: (LARGE + mask(float("nan"))).nansum(-1),
        ["aten.masked_fill.Scalar", "aten.nansum"],
    ),
    "a median of nan that was computed": (
        lambda: (torch.zeros(2, 3) / 0).nanmedian(-1).values,
        ["aten.div.Tensor"],
    ),
    "no mask": (lambda: torch.zeros(3).log(), ["aten.log"]),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_make_what_is_not_meant(case):
    run, makers = CASES[case]
    table, _ = traced(run)
    assert [row.name for row in table.ops if row.makes_bad] == makers


def test_a_row_that_is_masked_reduces():
    table, _ = traced(lambda: mask().sum(-1))
    assert [row.name for row in table.ops if row.reduces] == ["aten.sum.dim_IntList"]


@pytest.mark.parametrize("values", [[-INF, 0.0], [-INF, 1.0], [INF, 0.0]])
@pytest.mark.parametrize("kind", ["buffer", "batch", "unknown"])
def test_a_tensor_from_before_is_a_mask_by_what_it_holds(kind, values):
    held = torch.tensor(values)
    leaves = [Leaf(kind, "held", held)] * (kind != "unknown")
    table, result = traced(held.clone, leaves)
    found = trace_back(table.sources(result))
    is_meant = values[0] == -INF and (values[1] == 0 or kind != "batch")
    assert (found is None) == is_meant


def test_an_unknown_tensor_at_the_end_of_a_search_is_the_origin():
    held = mask()
    table, _ = traced(lambda: None)
    found = trace_back(table.sources(held))
    assert found is not None
    assert found.source.tensor is held


class Router(Assembled):
    """Scores of which all but the largest are -inf."""

    def forward(self, x):
        scores = self.scores(x)
        is_largest = scores == scores.max(-1, keepdim=True).values
        return scores.masked_fill(~is_largest, self.value)


class Routed(nn.Module):
    """A model that uses the scores, or returns them."""

    def __init__(self, returns_scores, value=-INF):
        super().__init__()
        self.router = Router(scores=nn.Linear(4, 3), value=value)
        self.returns_scores = returns_scores

    def forward(self, x):
        scores = self.router(x)
        return scores if self.returns_scores else scores.softmax(-1)


@pytest.mark.parametrize("returns_scores", [False, True])
def test_an_alarm_of_infs_that_code_has_written_names_it(returns_scores):
    torch.manual_seed(0)
    model = Routed(returns_scores, INF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(torch.randn(5, 4)).softmax(-1).sum().backward()
        optimizer.step()
    found = guard.last_report.explanation
    assert found.cause == CONSTANT.name and found.module == "router"
    assert found.op.name == "aten.masked_fill.Scalar"
    assert not any(each.is_recommended for each in found.remedies)


class Ratio(nn.Module):
    """Divides by a ratio that is 0 where a logarithm is infinite."""

    def __init__(self, numerator):
        super().__init__()
        self.numerator = numerator

    def forward(self, x):
        width = x.amax() - torch.log(x.amin())
        ratio = (x.amax() * self.numerator) / width
        return x / ratio


@pytest.mark.parametrize("numerator, name", [(1.0, "aten.log"), (0.0, "aten.div")])
def test_an_inf_that_a_division_has_made_0_is_the_cause_of_what_divides_by_it(
    numerator, name
):
    net = Ratio(numerator).eval()
    with OverflowGuard(net) as guard:
        with pytest.raises(NonFiniteError), torch.no_grad():
            net(torch.tensor([0.0, 1.0, 2.0]))
    found = guard.last_report.explanation
    assert found.op.name.startswith(name)
    is_told = any("made 0 of its infinite" in str(each) for each in found.evidence)
    assert is_told == (numerator == 1.0)


WRITTEN = {
    "filled": (lambda y: torch.cdist(y, y).fill_diagonal_(INF), "constant"),
    "multiplied": (lambda y: (y + 1) * INF, "constant"),
    "as a tensor": (lambda y: y + torch.tensor(INF), "constant"),
    "0 * inf": (lambda y: (y * 0) * INF, "undefined"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_inf_that_code_writes_is_a_constant(name, as_kept):
    write, cause = WRITTEN[name]
    model = nn.Linear(2, 2)
    nn.init.ones_(model.weight)
    found = explain(model, torch.ones(3, 2), lambda x: write(model(x)).sum())
    assert found.cause == cause
    as_kept(str(found).splitlines()[0])


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("by", ["code", "a buffer"])
def test_a_sum_of_masked_scores_is_infinite_and_not_undefined(by, as_kept):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    model.register_buffer("hidden", torch.zeros(3).index_fill(0, torch.tensor(2), -INF))

    def loss(x):
        scores = model(x)
        if by == "code":
            scores = scores.masked_fill(model.hidden != 0, -INF)
        else:
            scores = scores + model.hidden
        labels = torch.zeros(len(x), dtype=torch.long)
        return cross_entropy(scores, labels, label_smoothing=0.1)

    found = explain(model, torch.randn(5, 4), loss)
    assert found.cause == UNDEFINED.name and "sum" in found.op.name
    as_kept(found.words.gist(), *found.evidence)


@pytest.mark.parametrize("hidden", [2, 0])
def test_a_smoothed_loss_of_masked_scores_is_tried_without_smoothing(hidden):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def loss(x):
        scores = model(x).index_fill(1, torch.tensor(hidden), -INF)
        return cross_entropy(scores, torch.zeros(5).long(), label_smoothing=0.1)

    found = explain(model, torch.randn(5, 4), loss)
    helped = [each.code for each in found.remedies if each.is_recommended]
    code = "return cross_entropy(scores, torch.zeros(5).long(), label_smoothing=0.0)"
    assert helped == [code] * (hidden != 0)  # the label itself
