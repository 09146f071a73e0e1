"""Places that are easily named wrongly: hooks, masks, transforms."""

import importlib
import re
import sys

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import NonFiniteError, OverflowGuard, explain

pytestmark = pytest.mark.usefixtures("untried")

INF, NAN = float("inf"), float("nan")


def x(rows=3):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def net(out=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, out))


def explained(model, loss, optimizer=None, steps=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as error:
            for _ in range(steps):
                optimizer.zero_grad()
                guard.run(loss).backward()
                optimizer.step()
    return error.value.report.explanation


@pytest.mark.parametrize("name", ["div_", "pow_"])
def test_what_is_written_to_in_place_is_cloned_for_backward(name):
    """The clone has a node of its own, between the operation's and its run."""

    def loss_of(x):
        y = model(x)
        other = 0.5 if name == "pow_" else y.abs()
        return getattr(y * 1, name)(other).nan_to_num().mean()

    model = nn.Linear(4, 1, bias=False)
    found = explain(model, torch.zeros(2, 4), loss_of)
    line = loss_of.__code__.co_firstlineno + 3
    assert (found.phase, found.op.line) == ("backward", line)
    assert found.op.name.startswith(f"aten.{name}")


@pytest.mark.parametrize(
    "mean", [torch.nanmean, lambda y: y.nansum() / (~y.isnan()).sum()]
)
def test_nan_that_a_mean_leaves_out_is_its_origin_where_there_is_nothing_else(mean):
    model = nn.Linear(4, 1, bias=False)
    found = explain(model, torch.zeros(2, 4), lambda x: mean(model(x) / model(x)))
    assert (found.cause, found.op.operands) == ("undefined", [0.0, 0.0])
    assert found.chain == ["aten.div.Tensor", "aten.nansum", "aten.div.Tensor"]


def test_a_hook_on_a_parameter_s_gradient_is_no_code_of_its_module(as_kept):
    model = net()
    model[0].weight.register_hook(lambda g: g / (g.norm() * 0))
    found = explained(model, lambda: model(x()).mean())
    assert (found.phase, found.cause, found.module) == ("backward", "undefined", "")
    made, computed = found.evidence[:2]
    as_kept(made)
    assert computed.startswith("computed in float64")
    assert found.op.code.startswith("model[0].weight.register_hook")


@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_a_hook_on_a_gradient_within_the_model(kind):
    model = net()

    def hook(gradient):
        return gradient / (gradient.norm() * 0)

    def loss():
        hidden = model[0](x())
        if kind == "tensor":
            hidden.register_hook(hook)
        return model[1](hidden).mean()

    if kind == "module":
        model[1].register_full_backward_hook(lambda m, given, got: (hook(given[0]),))
    found = explained(model, loss)
    assert (found.cause, found.module) == ("undefined", "")
    assert "hook" in found.evidence[0]


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (x * 0)


class Uses(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x))


def guarded_log(y):
    return torch.where(y > 0, torch.log(y), y - 1)


@pytest.mark.tries_remedies
def test_gradients_that_reach_no_parameter(as_kept):
    torch.manual_seed(0)
    last = nn.Linear(4, 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Fn(function=guarded_log), last)
    found = explained(model, lambda: model(x()).mean())
    assert (found.phase, found.cause) == ("backward", "singular gradient")
    assert (found.op.name, found.module) == ("aten.log", "2")
    as_kept(found.notes)
    codes = [each.code for each in found.remedies if each.is_finite]
    assert any("torch.log(torch.where(y > 0, y" in code for code in codes), codes


class Fn(Assembled):
    def forward(self, y):
        return self.function(y)


def test_a_custom_function_is_no_hook():
    model = nn.Sequential(nn.Linear(4, 4), Uses(Flipped.apply))
    found = explained(model, lambda: model(x()).mean())
    assert (found.cause, found.module) == ("singular gradient", "1")
    assert not any("hook" in each for each in found.evidence)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_is_no_hook(is_reentrant):
    block = Uses(lambda hidden: (hidden * 0).sqrt())
    model = nn.Sequential(nn.Linear(4, 4), block)
    found = explained(
        model,
        lambda: checkpoint(block, model[0](x()), use_reentrant=is_reentrant).mean(),
    )
    assert (found.cause, found.module) == ("singular gradient", "1")
    assert not any("hook" in each for each in found.evidence)


@pytest.mark.tries_remedies
def test_hooks_behind_gradients_are_not_called_again():
    model = net()

    def hook(parameter):
        parameter.grad.div_(0)

    model[0].weight.register_post_accumulate_grad_hook(hook)
    found = explained(model, lambda: model(x()).mean())
    assert (found.phase, found.cause) == ("backward", "unknown")
    assert "register_post_accumulate_grad_hook" in found.notes[0]


def masked(scores, place):
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[place] = True
    return scores.masked_fill(mask, -INF)


@pytest.mark.tries_remedies
def test_a_label_whose_class_is_masked():
    model = net(5)

    def loss():
        return F.cross_entropy(masked(model(x()), (1, 4)), torch.tensor([0, 4, 2]))

    found = explained(model, loss)
    assert (found.phase, found.cause) == ("forward", "undefined")
    assert found.op.name == "aten.nll_loss_forward"
    assert "the -inf that masked_fill (" in found.reason
    assert found.sample is None  # the mask is made with as many rows as the batch
    assert not found.remedies  # a mask that is less deep makes a loss of 1e9


def test_a_row_that_is_masked_as_a_whole():
    model = net(5)
    found = explained(model, lambda: masked(model(x()), 1).logsumexp(-1).mean())
    assert (found.cause, found.op.name) == ("undefined", "aten.logsumexp")
    assert found.op.first_index == (1,)


def test_a_mask_that_is_masked_again_is_quiet():
    model = net(5)

    def loss():
        sums = masked(model(x()), 1).logsumexp(-1)
        kept = torch.where(sums > -1e9, sums, 0.0)
        return (kept / (kept * 0)).sum()

    assert explained(model, loss).op.name == "aten.div.Tensor"


@pytest.mark.tries_remedies
def test_a_mask_is_named_where_it_makes_a_nan():
    model = net(5)

    def loss():
        logs = masked(model(x()), (1, 4)).log_softmax(-1)
        return (logs.exp() * logs).sum()

    found = explained(model, loss)
    assert found.op.name == "aten.mul.Tensor"
    assert "the -inf that masked_fill (" in found.evidence[0]
    first = found.remedies[0]
    assert first.is_recommended and "scores.masked_fill(mask, -1e9)" in first.code


def test_an_operation_within_vmap():
    model = net()

    def one(sample):
        found = model(sample)
        return (found / (found * 0)).sum()

    found = explained(model, lambda: torch.vmap(one)(x()).mean())
    assert (found.phase, found.cause) == ("forward", "undefined")
    assert found.op.name == "aten.div.Tensor"
    assert found.op.code.startswith("return (found / (found * 0))")


def test_values_of_numpy_are_told_from_operations(as_kept):
    import numpy

    model = net()

    def loss():
        return model(x()).mean() * torch.from_numpy(numpy.float32([NAN])).sum()

    as_kept(explained(model, loss).reason)


def test_a_learning_rate_that_is_no_number(as_kept):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=NAN)
    found = explained(model, lambda: model(x()).mean(), optimizer, steps=2)
    assert (found.phase, found.tensor) == ("optimizer", "weight")
    as_kept(found.evidence)


def test_a_sparse_gradient_is_looked_at():
    model = nn.Embedding(8, 4, sparse=True)
    model.weight.data[5] = 0
    tokens = torch.tensor([1, 5])
    found = explained(model, lambda: model(tokens).square().sum(-1).sqrt().mean())
    assert (found.phase, found.cause) == ("backward", "singular gradient")
    assert found.op.name == "aten.sqrt"


def test_a_matrix_exponential_beyond_float64():
    model = net(4)
    found = explained(model, lambda: (model(x(4)) * 1e6).matrix_exp().mean())
    assert (found.cause, found.op.name) == ("range overflow", "aten.linalg_matrix_exp")


@pytest.mark.tries_remedies
@pytest.mark.parametrize(
    "divide", [lambda y: y / 0, lambda y: y.div_(0), lambda y: torch.div(y, 0)]
)
def test_a_zero_that_the_line_itself_writes_is_given_no_floor(divide):
    model = net()
    found = explained(model, lambda: divide(model(x())).mean())
    assert found.cause == "undefined"
    assert not any("count" in each.text for each in found.remedies)


@pytest.mark.tries_remedies
def test_a_number_of_python_that_is_zero(as_kept):
    model, count = net(), 0

    def loss():
        return (model(x()) / count).mean()

    found = explained(model, loss)
    codes = [each.code for each in found.remedies if each.is_recommended]
    assert any("max(count, 1)" in code for code in codes)
    as_kept([each.text for each in found.remedies])


@pytest.mark.tries_remedies
@pytest.mark.parametrize("lengths", [[2, 0, 3], [[0, 2, 0, 4]]])
def test_a_tensor_of_whole_numbers_that_is_zero(lengths, as_kept):
    model, lengths = net(4), torch.tensor(lengths)
    lengths = lengths if lengths.dim() > 1 else lengths[:, None]
    found = explained(model, lambda: (model(x()) / lengths).mean())
    first, *others = found.remedies
    assert first.is_recommended
    as_kept(first.text)
    assert all(each.tried for each in others if each.kind == "code")


def test_a_sum_that_is_0_is_not_said_to_count_a_mask(as_kept):
    model = net()

    def loss():
        guess, target = model(x()).relu() * 0, torch.zeros(3, 1)
        return (guess * target).sum() / (guess + target).sum()

    as_kept(explained(model, loss).reason)


@pytest.mark.tries_remedies
@pytest.mark.parametrize("is_edited", [False, True])
def test_a_line_is_not_read_from_a_file_that_was_edited_since(
    is_edited, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"edited_{is_edited}"
    file = tmp_path / f"{name}.py"
    text = "def loss(x):\n    return (x * 0 - 1).sqrt().mean()\n"
    file.write_text(text)
    module = importlib.import_module(name)
    if is_edited:
        file.write_text(
            text.replace("return", "y = 2\n    return").replace("- 1", "+ 1")
        )
    model = net()
    found = explained(model, lambda: module.loss(model(x())))
    assert found.op.line == 2
    assert found.op.code == ("" if is_edited else "return (x * 0 - 1).sqrt().mean()")
    assert is_edited or found.remedies
    assert "y = 2" not in str(found)


# What the operation reads, and what the report calls it.
READ = {
    "a weight": (lambda m, x, y: (x * 3e38) @ m.qkv.T, ["", "`qkv`"]),
    "a part": (lambda m, x, y: (x * 3e38) @ m.qkv[:4].T, ["", "part of `qkv`"]),
    "the batch": (lambda m, x, y: y / (x - x), ["`batch['y']`", ""]),
    "a buffer": (lambda m, x, y: m.scale / (y - y), ["`scale`", ""]),
    "nothing of these": (lambda m, x, y: (x * 2) / (y - y), ["", ""]),
}


@pytest.mark.parametrize("case", READ)
def test_what_the_operation_read_has_the_name_of_a_weight_or_input(case):
    function, names = READ[case]

    class Net(Assembled):
        def forward(self, x, y):
            return function(self, x, y)

    model = Net(qkv=nn.Parameter(torch.ones(12, 4)), scale=nn.Buffer(torch.ones(4)))
    batch = {"x": torch.ones(2, 4), "y": torch.ones(2, 4)}
    found = explain(model, batch, lambda batch: model(**batch).sum())
    assert [each.name for each in found.op.inputs] == names
    for each in filter(None, names):
        assert f"{each} [" in found.evidence[0]


def in_one_memory(model):
    """Puts all weights into one flat buffer, as training engines do."""
    parameters = list(model.parameters())
    sizes = [each.numel() for each in parameters]
    parts = torch.cat([p.detach().flatten() for p in parameters]).split(sizes)
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)
    return model


@pytest.mark.parametrize("name", ["0.weight", "1.bias", "2.weight"])
def test_a_weight_in_a_flat_buffer_has_its_own_name(name, as_kept):
    model = in_one_memory(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[1] = NAN
    found = explain(model, torch.ones(2, 4), lambda x: model(x).sum())
    assert (found.cause, found.tensor) == ("bad weights", name)
    as_kept(found.evidence[0])


def test_a_large_weight_in_a_flat_buffer_has_its_own_name():
    model = in_one_memory(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    with torch.no_grad():
        model[1].weight.fill_(3e38)
    found = explain(model, torch.ones(2, 4), lambda x: model(x * 100).sum())
    assert [each.name for each in found.op.inputs] == ["`1.bias`", "", "`1.weight`"]


@pytest.mark.parametrize("axis", [0, 1])
def test_inputs_that_share_their_memory_are_told_apart(axis):
    data = torch.ones(8, 8)
    data[6, 6] = NAN
    first, second = data.split(4, axis)
    model = nn.Linear(second.shape[1], 1)

    def loss(batch):
        return (batch["a"] * 2).sum() * 0 + model(batch["b"]).sum()

    found = explain(model, {"a": first, "b": second}, loss)
    assert (found.cause, found.tensor) == ("bad data", "batch['b']")


def test_what_shares_memory_with_an_input_is_not_called_the_input():
    data = torch.ones(8, 4)
    data[6] = NAN
    model = nn.Linear(4, 1)
    found = explain(model, data[:4], lambda x: model(x).sum() + data[4:].sum())
    assert "batch" not in found.tensor
    assert found.cause != "bad data"


def test_a_partition_has_the_name_of_its_weight(as_kept):
    """As in ZeRO-3: partitions lie in a flat buffer, and are gathered in forwards."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    weights = list(model.parameters())
    flat = torch.cat([each.detach().flatten() for each in weights])
    begin = 0
    for weight in weights:
        weight.part = flat[begin : begin + weight.numel()]
        begin += weight.numel()

    def gather(module, _):
        for each in module.parameters(recurse=False):
            each.data = torch.cat([each.part]).view(each.shape)

    for layer in model:
        layer.register_forward_pre_hook(gather)
    model[1].weight.part[3] = NAN

    def loss(x):
        return model(x).sum() + 0 * len(flat)

    found = explain(model, torch.ones(2, 4), loss)
    assert (found.cause, found.tensor) == ("bad weights", "1.weight")
    as_kept(found.evidence[0])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the columns are not known")
@pytest.mark.parametrize("which", ["first", "second", "whole", "long"])
def test_a_line_that_is_too_long_is_cut_around_what_failed(which):
    model = nn.Linear(6, 4)
    p, q = (0.0, 0.5) if which == "first" else (0.5, 0.0)

    def loss(x):
        a, b = model(x).sigmoid() * 0 + p, model(x).sigmoid() * 0 + q
        if which == "long":
            return torch.log(model(x).sigmoid() * torch.zeros_like(a, dtype=torch.float32) + b).sum()  # fmt: skip # noqa: E501
        if which == "whole":
            return sum([torch.log(  b  ).sum(), a.sum(), b.sum(), (a * b).sum(), (a + b).sum()])  # fmt: skip # noqa: E501
        return torch.mean(torch.sum(-a * torch.log(a) - (1 - a) * torch.log(b), 1)) * 10.0  # fmt: skip # noqa: E501

    found = explain(model, torch.ones(5, 6), loss)
    _, code, marks, *_ = str(found).splitlines()
    expected = {"first": "torch.log(a)", "second": "torch.log(b)"}
    expected["long"] = "torch.log(model(x).sigmoid() * torch.zeros_like(a,"
    begin = marks.index("^")
    shown = code[begin : len(marks)]
    assert shown.startswith(expected.get(which, "torch.log(  b  )"))
    assert ("return " in code) == (which != "second")
    last = code.removesuffix(" ...")[-9:]  # a cut leaves names as they are
    assert re.search(rf"{re.escape(last)}(?!(?<=\w)\w)", found.op.code)
    assert set(marks.strip()) == {"^"} and code.startswith("code ") and len(code) <= 80
    begin, end = found.op.columns
    assert found.op.code[begin:end].startswith("torch.log(")
