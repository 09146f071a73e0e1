"""Verdicts name a maker only where nothing else can have made the value."""

import math
import sys
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from pairs import pairs
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.guard.report.entry_words import what_of

INF, NAN = math.inf, math.nan


def report_of(model, loss_fn, optimizer=None, record=False, **arguments):
    """The report of one step under a guard that only warns."""
    models = model if isinstance(model, (list, tuple)) else [model]
    parameters = [p for each in models for p in each.parameters()]
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1)
    with OverflowGuard(model, optimizer, "warn", **arguments) as guard:
        loss = loss_fn(model)
        if record:
            guard.record(loss=loss)
        loss.backward()
        optimizer.step()
    return guard.last_report


def verdict_of(*arguments, record=True, **options):
    return report_of(*arguments, record=record, explain=False, **options).verdict


def mean_of(model):
    """What most tests take for a loss."""
    return model(inputs()).mean()


def inputs(seed=0, *shape):
    return torch.randn(
        *(shape or (4, 3)), generator=torch.Generator().manual_seed(seed)
    )


class SqrtAtZero(nn.Module):
    """Finite, and its gradient is not."""

    def forward(self, x):
        return torch.sqrt(x * 0)


class Inner(nn.Module):
    """Holds the fault in one of several places."""

    def __init__(self, where):
        super().__init__()
        self.a, self.b, self.where = nn.Linear(3, 3), nn.Linear(3, 3), where
        self.leaf = SqrtAtZero()

    def forward(self, x):
        if self.where == "leaf":
            return self.b(self.leaf(self.a(x)))
        if self.where == "between":
            return self.b(torch.sqrt(self.a(x) * 0))
        if self.where == "after":
            return torch.sqrt(self.b(self.a(x)) * 0)
        if self.where == "before":
            return self.b(self.a(torch.sqrt(x * 0)))
        if self.where == "trap":
            h = self.a(x)
            return self.b(torch.where(h * 0 > 0, (h * 0).sqrt(), h))
        if self.where == "deviation":
            h = self.a(x)
            return self.b((h - h).var(1, keepdim=True).sqrt() + h)
        if self.where == "gate":  # computed before b is called, and used after it
            h = self.a(x)
            gate = torch.sqrt(h * 0)
            return self.b(h) * gate
        return self.b(x) + torch.sqrt(self.a(x) * 0)  # residual


class Outer(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.stem, self.p, self.head = nn.Linear(3, 3), Inner(where), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.p(self.stem(x)))


@pytest.mark.parametrize(
    ("where", "at", "after"),
    [
        ("leaf", "p.a", "p.leaf"),
        ("between", "p.a", "p.b"),
        ("after", "p.b", "p"),
        ("before", "stem", "p.a"),
        ("trap", "p.a", "p.b"),
        ("deviation", "p.a", "p.b"),
        ("gate", "p.a", "p.b"),
        ("residual", "p.a", "p"),
    ],
)
def test_the_last_finite_gradient_before_a_bad_one_is_named(where, at, after):
    verdict = verdict_of(Outer(where), mean_of)
    assert (verdict.first.kind, verdict.first.fqn) == ("grad_output", at)
    assert verdict.origin.after == after
    assert verdict.origin.maker == (
        f"code that used the output of {at}, or a hook on it; "
        f"the gradient seen last before it, of {after}, was finite"
    )
    assert (verdict.origin.how, verdict.origin.source) == ("unclear", "unclear")


class Branches(Assembled):
    def forward(self, x):
        h = self.stem(x)
        return self.good(h) + self.bad(h)


def test_the_branch_that_ran_last_is_not_blamed():
    verdict = verdict_of(
        Branches(stem=nn.Linear(3, 3), good=nn.Linear(3, 3), bad=SqrtAtZero()), mean_of
    )
    assert verdict.first.fqn == "stem"
    assert (verdict.origin.how, verdict.origin.candidates) == ("unclear", [])


def test_a_branch_between_that_is_not_connected_is_not_blamed():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b1, self.b2 = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            h = torch.sqrt(self.a(x).sub(self.a(x)).pow(2).sum(-1))
            return h[:, None] + self.b2(torch.tanh(self.b1(x)))

    verdict = verdict_of(nn.Sequential(Two(), nn.Linear(3, 1)), mean_of)
    assert verdict.first.fqn == "0.a"
    assert (verdict.origin.how, verdict.origin.candidates) == ("unclear", [])


def test_attention_computed_by_the_parent(as_kept):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            scores = self.q(x) @ self.k(x).transpose(-1, -2)
            weights = (scores * 0).sqrt().softmax(-1)
            return self.o(weights @ self.v(x))

    model = nn.Sequential(nn.Linear(4, 4), Attention())
    verdict = verdict_of(model, lambda m: m(inputs(0, 2, 3, 4)).sum())
    assert verdict.first.fqn in ("1.q", "1.k")
    assert verdict.origin.how == "unclear"
    as_kept(verdict.origin.maker)


class Heads(Assembled):
    def forward(self, x):
        y = self.body(x)
        return self.h1(y), self.h2(y)


def test_code_of_the_loss_behind_several_heads():
    def loss_of(model):
        a, b = model(inputs())
        return torch.sqrt(a.sum() * 0) + b.mean()

    verdict = verdict_of(
        Heads(body=nn.Linear(3, 4), h1=nn.Linear(4, 2), h2=nn.Linear(4, 1)), loss_of
    )
    assert verdict.first.fqn == "h1"
    assert verdict.origin.source == "unclear"


def test_a_gradient_given_to_backward_is_not_a_modules():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(inputs()).backward(torch.full((4, 2), NAN))
        optimizer.step()
    verdict = guard.last_report.verdict
    assert verdict.origin.source == "loss" and "the loss" in verdict.origin.candidates


def test_a_hook_on_a_tensor_can_have_made_it(as_kept):
    def spoil(module, args, output):
        output.register_hook(lambda gradient: gradient / 0)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].register_forward_hook(spoil)
    verdict = verdict_of(model, mean_of)
    assert verdict.first.fqn == "0"
    assert verdict.origin.how == "unclear"
    as_kept(verdict.origin.maker)


def test_a_step_of_two_forwards_tells_their_nodes_apart():
    model = Outer("leaf")

    def loss_of(model):
        model(inputs()).mean().backward()
        model.p.where = "between"
        return model(inputs()).mean()

    verdict = verdict_of(model, loss_of)
    assert (verdict.origin.how, verdict.origin.after) == ("unclear", "p.leaf")


def test_gradients_that_arise_in_checkpointed_code():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self, use_reentrant):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
            self.use_reentrant = use_reentrant

        def forward(self, x):
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=self.use_reentrant)
            return self.c(torch.sqrt(x * 0))

    for use_reentrant in (False, True):
        verdict = verdict_of(Net(use_reentrant), mean_of)
        assert verdict.first.fqn == "b"
        assert verdict.origin.how == "unclear"


# Gradients of parameters, where those of outputs are finite.


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def spoil(model):
    model[2].bias.grad[0] = NAN


def divide(model):
    for parameter in model.parameters():
        parameter.grad.div_(0)


@pytest.mark.parametrize("change", [[spoil, clip], [divide]])
def test_all_gradients_bad_is_after_backward(change, as_kept):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(inputs()).mean().backward()
        for each in change:
            each(model)
        optimizer.step()
    verdict = guard.last_report.verdict
    assert verdict.origin.source == "after_backward"
    as_kept(verdict.origin.maker)
    assert "its own backward" not in str(guard.last_report)


def test_a_penalty_on_a_weight_may_have_made_a_gradient(as_kept):
    model = mlp()
    nn.init.zeros_(model[2].weight)
    verdict = verdict_of(model, lambda m: mean_of(m) + m[2].weight.pow(2).sum().sqrt())
    assert verdict.origin.how == "unclear"
    as_kept(verdict.origin.maker)


# The batch.


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(3, 1)

    def forward(self, pixel_values, labels=None):
        out = self.f(pixel_values)
        loss = None if labels is None else F.mse_loss(out, labels)
        return {"loss": loss, "logits": out}


HANDED_OVER = ["the batch", "the training loop"]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.explains
def test_a_bad_feature_was_handed_over(value, as_kept):
    x = inputs()
    x[3, 1] = value
    verdict = verdict_of(
        Tabular(), lambda m: m(pixel_values=x, labels=inputs(1, 4, 1))["loss"]
    )
    assert (verdict.origin.how, verdict.origin.source) == ("given", "unclear")
    assert verdict.origin.candidates == HANDED_OVER
    (place,) = verdict.origin.batch_places
    as_kept(place)


@pytest.mark.explains
def test_a_bad_label_of_a_model_that_computes_its_loss(as_kept):
    labels = inputs(1, 4, 1)
    labels[2] = NAN
    verdict = verdict_of(Tabular(), lambda m: m(inputs(), labels=labels)["loss"])
    assert verdict.origin.candidates == HANDED_OVER
    as_kept(verdict.origin.batch_places)


def test_a_bad_label_outside_of_the_model_may_be_the_batchs():
    verdict = verdict_of(
        nn.Linear(3, 1), lambda m: F.mse_loss(m(inputs()), torch.full((4, 1), NAN))
    )
    assert verdict.origin.source == "loss"
    assert set(verdict.origin.candidates) == {"the loss", "the batch"}
    verdict = verdict_of(
        nn.Linear(3, 1),
        lambda m: F.mse_loss(m(inputs()), torch.full((4, 1), NAN)),
        record=False,
    )
    assert {"the loss", "the batch"} <= set(verdict.origin.candidates)


def test_a_mask_of_minus_inf_is_not_blamed():
    class Masked(nn.Module):
        def forward(self, x, mask):
            return (x.exp().exp().exp().exp() + mask).softmax(-1)

    model = nn.ModuleDict({"a": Masked(), "b": nn.Linear(3, 3)})
    model.forward = lambda x, mask: model["a"](model["b"](x), mask)
    mask = torch.zeros(4, 3)
    mask[:, 0] = -INF
    verdict = verdict_of(model, lambda m: m(inputs() * 100, mask).sum())
    assert verdict.origin.source != "batch"
    assert "a" in verdict.origin.candidates


def test_what_arises_between_two_models_is_not_the_batch(as_kept):
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    verdict = verdict_of([first, second], lambda m: m[1](m[0](inputs()) / 0).mean())
    assert (verdict.origin.source, verdict.origin.candidates) == (
        "caller",
        ["the training loop"],
    )
    as_kept(verdict.origin.maker)
    # Autograd knows nothing of it.
    verdict = verdict_of(
        [nn.Linear(3, 3), nn.Linear(3, 1)],
        lambda m: m[1]((m[0](inputs()) / 0).detach()).mean(),
    )
    assert (verdict.origin.source, verdict.origin.candidates) == (
        "unclear",
        HANDED_OVER,
    )
    assert verdict.origin.after == "0"


def test_what_arises_between_submodules_that_a_loop_calls_is_not_the_batch():
    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.encoder(x)

    model = Lit()
    verdict = verdict_of(
        model, lambda m: m.decoder(torch.log(m.encoder(inputs()) * 0)).mean()
    )
    assert verdict.first.fqn == "decoder"
    assert verdict.origin.candidates == ["the training loop"]
    verdict = verdict_of(
        Lit(), lambda m: m.decoder(torch.log(m.encoder(inputs()) * 0 - 1)).mean()
    )
    assert verdict.origin.candidates == ["the training loop"]
    x = inputs()
    x[0] = NAN
    verdict = verdict_of(Lit(), lambda m: m.decoder(m.encoder(x)).mean())
    assert verdict.first.fqn == "encoder"
    assert "the batch" in verdict.origin.candidates


def test_a_model_that_writes_to_the_batch_is_not_overlooked():
    class Normalizes(Assembled):
        def forward(self, x):
            return self.fc(x.div_(x.std() * 0))

    verdict = verdict_of(Normalizes(fc=nn.Linear(3, 1)), mean_of)
    assert verdict.origin.how == "unclear"
    assert set(verdict.origin.candidates) == {"the model", *HANDED_OVER}


def roll_out(model):
    return model((model(inputs()).detach().abs() * 1e4).exp())


def frozen_teacher(model):
    return model(F.linear(inputs(), torch.full((3, 3), INF)))


def refilled_in_place(model):
    static = inputs()
    model(static)
    return model(static.div_(0))


@pytest.mark.explains
def test_minus_inf_in_a_feature_of_a_linear_layer_was_handed_over(as_kept):
    x = inputs()
    x[3, 1] = -INF
    verdict = verdict_of(nn.Linear(3, 1), lambda m: m(x).mean())
    assert verdict.origin.candidates == HANDED_OVER
    as_kept(verdict.origin.batch_places)


class Biased(Assembled):
    """Overflows by itself, next to a bias that holds -inf."""

    def forward(self, x, bias):
        if self.is_inner:
            return self.q(((x * 1e30).exp() + bias).exp())
        return (self.q(x) * 1e30 + bias).exp()


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("is_root", [False, True])
@pytest.mark.explains
def test_minus_inf_in_a_bias_is_a_possibility(is_root, is_inner, as_kept):
    k = torch.arange(5)
    bias = -(k[:, None] - k).abs() * 0.1
    bias = bias.masked_fill(k > k[:, None], -INF)
    model = Biased(q=nn.Linear(5, 5), is_inner=is_inner)
    if not is_root:
        model = nn.ModuleDict({"attn": model})
        model.forward = lambda x, bias: model["attn"](x, bias)
    verdict = verdict_of(model, lambda m: m(torch.ones(5, 5), bias).mean())
    assert verdict.origin.how == "unclear"
    name = "the model" if is_root else "attn"
    assert set(verdict.origin.candidates) >= {name, *HANDED_OVER}
    as_kept(verdict.origin.maker)


def test_a_function_that_holds_nothing_brings_no_value():
    class Applies(nn.Linear):
        def forward(self, x, function):
            return function(super().forward(x))

    def double(x):
        return (x * 0).log() * 0

    verdict = verdict_of(Applies(3, 3), lambda m: m(inputs(), double).mean())
    assert "was not searched" not in verdict.origin.maker


class Data:
    """A batch that is looked into."""

    def __init__(self, x):
        self.x = x


class Hidden:
    """A batch whose code makes its tensor: no walk finds it."""

    def __init__(self, x):
        self._made = x.tolist()

    @property
    def x(self):
        return torch.tensor(self._made)


class Reads(nn.Module):
    """Takes its values out of whatever it was given."""

    def __init__(self, has_layer):
        super().__init__()
        self.fc = nn.Linear(3, 3) if has_layer else None
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, d):
        d = d["x"] if isinstance(d, (dict, UserDict)) else d
        x = inputs() * d if isinstance(d, float) else getattr(d, "x", d)
        x = torch.as_tensor(x) * self.scale
        return x if self.fc is None else self.fc(x)


UNSEEN = [Hidden, lambda x: {"x": Hidden(x)}, torch.Tensor.numpy, 0]


@pytest.mark.parametrize(
    "wrap, has_layer, is_keyword", pairs(UNSEEN, (False, True), (False, True))
)
def test_what_nobody_looked_into_is_not_called_finite(wrap, has_layer, is_keyword):
    x = inputs()
    x[2] = NAN
    batch = wrap(x) if wrap else NAN
    arguments = {"d": batch} if is_keyword else {}
    positional = () if is_keyword else (batch,)
    model = Reads(has_layer)
    verdict = verdict_of(model, lambda m: m(*positional, **arguments).mean())
    assert verdict.origin.how == "unclear"
    assert set(verdict.origin.candidates) == {"the model", *HANDED_OVER}
    maker, place = verdict.origin.maker, "input.d" if is_keyword else "input[0]"
    assert maker.endswith(f"; {place} of the model was not searched")
    assert ("between the calls of its submodules" in maker) == has_layer
    if is_keyword:
        return
    model = nn.Sequential(Reads(has_layer))
    verdict = verdict_of(model, lambda m: m(*positional).mean())
    assert set(verdict.origin.candidates) == {"0", "the model", *HANDED_OVER}


@pytest.mark.parametrize("is_keyword", [False, True])
@pytest.mark.parametrize("wrap", [Data, lambda x: UserDict(x=x)])
@pytest.mark.explains
def test_what_an_object_holds_is_searched(wrap, is_keyword, as_kept):
    x = inputs()
    x[2] = NAN
    arguments = {"d": wrap(x)} if is_keyword else {}
    positional = () if is_keyword else (wrap(x),)
    verdict = verdict_of(Reads(True), lambda m: m(*positional, **arguments).mean())
    assert verdict.origin.how == "given"
    as_kept(verdict.origin.maker)


@pytest.mark.parametrize(
    "wrap, candidates",
    [(Data, ["the model"]), (lambda x: Hidden(x.detach()), ["reads", "the model"])],
)
def test_an_object_that_the_model_made_is_searched_or_may_hold_it(wrap, candidates):
    class Wraps(Assembled):
        def forward(self, x):
            return self.reads(wrap(self.fc(x) / 0))

    verdict = verdict_of(Wraps(fc=nn.Linear(3, 3), reads=Reads(False)), mean_of)
    assert verdict.origin.candidates == candidates


def test_plain_arguments_of_the_model_hold_nothing_bad():
    class Scaled(Assembled):
        def forward(self, x, *_, **__):
            return self.fc(x) / 0

    plain = (
        torch.arange(3),
        torch.ones(2, dtype=torch.bool),
        1,
        2.0,
        "a",
        True,
        None,
        torch.float16,
        [1, {"a": 0.5}],
    )
    verdict = verdict_of(
        Scaled(fc=nn.Linear(3, 3)), lambda m: m(inputs(), *plain, key=1e3).mean()
    )
    assert (verdict.origin.how, verdict.origin.candidates) == ("made", ["the model"])


class Ravels(nn.Module):
    """Takes whatever shapes there are."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x, y=None):
        return self.fc(x.reshape(-1, 1))


@pytest.mark.parametrize(
    ("make", "shape", "others"),
    [
        (lambda: nn.GRU(4, 5), (10, 3, 4), []),
        (Ravels, (10, 4), [torch.ones(3, 4)]),
        (Ravels, (10,), []),
    ],
)
def test_an_index_is_not_called_a_sample_where_that_is_not_known(
    make, shape, others, as_kept
):
    x = torch.ones(shape)
    x[7] = NAN
    as_kept(verdict_of(make(), lambda m: m(x, *others)[0].sum()).origin.batch_places)
    x[2] = NAN
    as_kept(verdict_of(make(), lambda m: m(x, *others)[0].sum()).origin.batch_places[0])


def test_a_batch_that_was_written_to_since_is_not_read_for_its_place():
    x = inputs()
    x[1] = NAN

    def loss_of(model):
        loss = model(x).mean()
        x.copy_(inputs())[2] = NAN
        return loss

    verdict = verdict_of(
        nn.Sequential(Doubles(scale=nn.Parameter(torch.ones(())))), loss_of
    )
    assert verdict.origin.batch_places == ["`input[0]`"]


class Doubles(Assembled):
    def forward(self, x):
        return x.clone() * self.scale


@pytest.mark.parametrize("compute", [roll_out, frozen_teacher, refilled_in_place])
def test_what_the_loop_computed_is_not_said_to_be_the_batchs(compute, as_kept):
    report = report_of(nn.Linear(3, 3), lambda m: compute(m).mean())
    assert report.verdict.origin.source == "unclear"
    assert report.verdict.origin.candidates == HANDED_OVER
    as_kept(report.sentences())


# Calls.


class Logs(Assembled):
    def forward(self, x):
        return self.fc(x.mul_(INF))


class InPlace(nn.Module):
    def forward(self, x):
        return x.mul_(INF)


@pytest.mark.parametrize("make", [InPlace, lambda: Logs(fc=nn.Linear(3, 1))])
def test_who_writes_to_its_input_is_a_candidate(make):
    verdict = verdict_of(nn.Sequential(nn.Linear(3, 3), make()), mean_of)
    assert verdict.origin.how == "unclear" and "1" in verdict.origin.candidates


def test_what_is_not_watched_within_is_said(as_kept):
    class Block(Assembled):
        def forward(self, x):
            return self.fc2(self.fc1(x) / 0)

    model = nn.Sequential(
        Block(fc1=nn.Linear(3, 3), fc2=nn.Linear(3, 3)), nn.Linear(3, 1)
    )
    report = report_of(model, mean_of, exclude=["0.fc*"])
    assert report.verdict.origin.maker == "0"
    assert report.verdict.origin.unwatched == ["0.fc1", "0.fc2"]
    as_kept(report.sentences())


def test_a_module_whose_frames_are_printed_is_watched(as_kept):
    class Returned:
        """An object whose parts are not scanned."""

    class Body(nn.Linear):
        def forward(self, x):
            return super().forward(x), Returned()

    class Model(Assembled):
        def forward(self, x):
            return self.head(self.body(x)[0]) / 0

    report = report_of(Model(body=Body(3, 3), head=nn.Linear(3, 1)), mean_of)
    assert report.verdict.origin.maker == "the model"
    as_kept(report)


def test_the_batch_is_not_blamed_for_what_is_not_watched():
    verdict = verdict_of(
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)),
        lambda m: m[1](m[0](inputs()) / 0).mean(),
        include=["1"],
    )
    assert verdict.origin.source == "unclear"
    assert "the model" in verdict.origin.candidates


def test_a_parent_that_was_not_called_is_not_blamed():
    class Root(Assembled):
        def forward(self, x):  # calls its grandchild
            return self.head(self.body.a(x / 0))

    verdict = verdict_of(Root(body=Inner("between"), head=nn.Linear(3, 1)), mean_of)
    assert verdict.first.fqn == "body.a"
    assert verdict.origin.candidates == ["the model"]


def test_a_container_says_after_which_call(as_kept):
    class Tail(Assembled):
        def forward(self, x):
            return self.qkv(x) / 0

    model = nn.Sequential(nn.Linear(3, 3), Tail(qkv=nn.Linear(3, 3)))
    report = report_of(model, mean_of)
    assert report.verdict.origin.after == "1.qkv"
    as_kept(report)


def test_running_statistics_of_training_are_not_what_made_it():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    verdict = verdict_of(model, lambda m: m(inputs() * 1e30).mean())
    assert verdict.first.fqn != "0" or verdict.origin.source != "buffer"


# Weights.


def test_a_weight_that_was_bad_comes_before_an_earlier_overflow():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)).half()
    with torch.no_grad():
        model[0].weight.fill_(6e4)
        model[2].weight[0, 0] = INF
    verdict = verdict_of(model, lambda m: m(torch.ones(4, 3).half()).float().mean())
    assert (verdict.first.kind, verdict.first.fqn) == ("weight", "2.weight")
    assert (verdict.origin.how, verdict.origin.source) == ("given", "weight")
    assert "never seen finite" in verdict.origin.maker


def test_weights_that_a_bad_step_has_written_do_not_come_first():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = inputs()
    x[1] = NAN
    with OverflowGuard(model, on_overflow="warn") as guard:  # knows of no optimizer
        model(x).mean().backward()
        optimizer.step()
        verdict = guard.check().verdict
    assert verdict.origin.candidates == ["the batch", "the program"]


def test_a_bad_setting_of_the_optimizer_is_looked_up(as_kept):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        for _ in range(2):
            model(inputs()).mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["weight_decay"] = INF
            assert guard.last_report is None
        model(inputs()).mean().backward()
        optimizer.step()
    verdict = guard.last_report.verdict
    assert verdict.origin.source == "weight"
    as_kept(verdict.origin.maker, verdict.origin.remarks)


# What cannot be seen.


def test_a_hook_that_replaces_inputs_is_a_candidate():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].register_forward_pre_hook(lambda module, args: (args[0] / 0,))
    verdict = verdict_of(model, mean_of)
    assert verdict.origin.how == "unclear"
    assert {"the model", "1"} <= set(verdict.origin.candidates)


@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_hook_that_replaces_inputs_of_the_model_is_a_candidate(value):
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda m, args: (torch.full_like(args[0], value),))
    verdict = verdict_of(model, mean_of)
    assert set(verdict.origin.candidates) >= {"the model", *HANDED_OVER}


def test_a_hook_that_replaces_an_output_later_is_a_candidate(as_kept):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model[0].register_forward_hook(lambda module, args, output: output / 0)
        model(inputs()).mean().backward()
        optimizer.step()
    as_kept(guard.last_report.verdict.origin.unwatched)


def test_an_output_that_was_not_scanned_may_hold_it(as_kept):
    class Hides(nn.Module):
        def forward(self, x):
            return Hidden((x / 0).detach())

    class Net(Assembled):
        def forward(self, x):
            return self.fc(self.hides(x).x)

    verdict = verdict_of(Net(hides=Hides(), fc=nn.Linear(3, 1)), mean_of)
    as_kept(verdict.origin.unwatched)
    as_kept(verdict.origin.maker)


@pytest.mark.parametrize("where", ["leaf", "between", "before", "residual"])
def test_gradients_on_a_device_are_not_blamed_on_one_module(where):
    verdict = verdict_of(Outer(where), mean_of, _defer=True)
    assert (verdict.origin.how, verdict.origin.source) == ("unclear", "unclear")


def test_calls_of_a_step_that_is_judged_late_are_still_known():
    class Divides(nn.Module):
        divisor = 1.0

        def forward(self, x):
            return x / self.divisor

    class Net(Assembled):
        def forward(self, x):
            return self.b(self.a(x))

    model = Net(a=nn.Linear(3, 3), b=Divides(), unused=nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.unused.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "warn", sync="lagged", _defer=True)
    with guard:
        for divisor in (1.0, 0.0, 1.0):
            model.b.divisor = divisor
            model(inputs()).mean().backward()
            optimizer.step()
    verdict = guard.last_report.verdict
    assert (verdict.origin.how, verdict.origin.candidates) == ("made", ["b"])


def test_an_alarm_is_raised_although_its_maker_cannot_be_found_out(monkeypatch):
    from overflow_fast.guard.verdict import origin

    def fail(*_):
        raise ValueError("no calls")

    monkeypatch.setattr(origin, "origin_in_forward", fail)
    x = inputs()
    x[0] = NAN
    verdict = verdict_of(mlp(), lambda m: m(x).mean())
    assert verdict.first.kind == "input"
    assert (verdict.origin.how, verdict.origin.candidates) == ("unclear", [])


def test_batches_are_not_kept_alive():
    import weakref

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False):
        x = inputs()
        held = weakref.ref(x)
        loss = model(x).mean()
        loss.backward()
        del x
        assert held() is None
        optimizer.step()


def test_statistics_in_a_parameter_are_not_what_was_there_before():
    class Center(nn.Module):
        def __init__(self):
            super().__init__()
            self.center = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            self.center.copy_(x.detach().mean(0))
            return x - self.center

    x = inputs()
    x[1] = NAN
    model = nn.Sequential(Center(), nn.Linear(3, 1))
    verdict = verdict_of(model, lambda m: m(x).mean())
    assert verdict.first.kind == "input"
    assert verdict.origin.candidates == HANDED_OVER
    frozen = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1))
    frozen[0].weight.requires_grad_(False)[1] = NAN
    verdict = verdict_of(frozen, lambda m: m(torch.arange(4)).mean())
    assert (verdict.origin.source, verdict.origin.candidates) == (
        "weight",
        ["0.weight"],
    )


def test_gradients_of_outputs_that_nobody_saw_are_not_called_finite(as_kept):
    model = mlp()

    def loss_of(model):
        with torch.no_grad():
            model(inputs())
        return model[2].weight.pow(2).sum().sqrt() * NAN

    verdict = verdict_of(model, loss_of, record=False)
    assert verdict.origin.how == "unclear"
    as_kept(verdict.origin.maker)


@pytest.mark.parametrize("is_called", [False, True])
def test_gradients_that_torch_func_hides_are_not_called_finite(is_called, as_kept):
    model, x = mlp(), inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x[None],)).sum()

    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        weights = {k: v.detach() for k, v in model.named_parameters()}
        if is_called:
            model(x).sum().backward()
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        for name, parameter in model.named_parameters():
            parameter.grad = found[name].mean(0) * NAN
        optimizer.step()
    maker = guard.last_report.verdict.origin.maker
    assert "outputs were finite" not in maker
    as_kept(maker)


# Buffers.


class Adds(nn.Module):
    """Adds a buffer of its own, or lets a child that has none add it."""

    def __init__(self, through_child=False):
        super().__init__()
        self.register_buffer("pos", torch.full((3,), NAN), persistent=False)
        self.embed, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.child = ReadsOwners(self) if through_child else None

    def forward(self, x):
        h = self.embed(x)
        return self.norm(h + self.pos if self.child is None else self.child(h))


class ReadsOwners(nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]

    def forward(self, x):
        return x + self.owner[0].pos


@pytest.mark.parametrize("watch", [["activations"], ["activations", "buffers"]])
@pytest.mark.parametrize(("through_child", "code"), [(False, ""), (True, "child")])
def test_a_bad_buffer_of_any_module_is_a_candidate(through_child, code, watch):
    model = Adds(through_child)
    verdict = verdict_of(model, mean_of, watch=watch)
    assert verdict.origin.how == "unclear"
    assert verdict.origin.candidates == [code or "the model", "pos"]


def test_a_bad_buffer_that_a_layer_of_torch_does_not_read_is_no_candidate():
    class Net(Assembled):
        def forward(self, x):
            return self.fc(x)

    model = Net(unused=nn.Buffer(torch.full((3,), NAN)), fc=nn.Linear(3, 3))
    nn.init.ones_(model.fc.weight)
    verdict = verdict_of(model, lambda m: m(torch.full((4, 3), 3e38)).mean())
    assert (verdict.origin.how, verdict.origin.candidates) == ("made", ["fc"])


# Modules that others have too.


class Half(nn.Module):
    def __init__(self, shared, is_bad=False):
        super().__init__()
        self.shared, self.is_bad = shared, is_bad

    def forward(self, x):
        return self.shared(torch.log(-x.abs()) if self.is_bad else x)


@pytest.mark.parametrize("bad", [0, 1])
def test_all_who_have_a_shared_module_are_candidates(bad):
    shared = nn.Linear(3, 3)
    model = nn.Sequential(*(Half(shared, i == bad) for i in range(2)))
    verdict = verdict_of(model, mean_of)
    assert str(bad) in verdict.origin.candidates
    assert verdict.origin.how == "unclear"


def test_a_bad_batch_is_the_batchs_where_modules_are_shared():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(Half(shared), Half(shared))
    verdict = verdict_of(model, lambda m: m(inputs() * NAN).mean())
    assert verdict.origin.candidates == ["the batch", "the training loop"]


def test_a_module_that_two_models_share_may_have_been_called_by_either():
    shared = nn.Linear(3, 3)
    a, b = Half(shared), Half(shared, is_bad=True)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    verdict = verdict_of([a, b], lambda _: b(a(inputs())).mean(), optimizer)
    assert verdict.origin.how == "unclear"
    assert "1" in verdict.origin.candidates


# Hooks of others, and gradients that were there before.


@pytest.mark.parametrize("is_global", [False, True])
def test_a_hook_that_runs_before_an_output_is_looked_at_is_named(is_global, as_kept):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def spoil(module, args, output):
        return output * NAN if module is model[0] else None

    register = (
        nn.modules.module.register_module_forward_hook
        if is_global
        else model[0].register_forward_hook
    )
    handle = register(spoil)
    try:
        verdict = verdict_of(model, mean_of)
    finally:
        handle.remove()
    assert (verdict.origin.how, verdict.origin.candidates) == ("made", ["0"])
    as_kept(verdict.origin.unwatched)


def test_a_hook_on_a_tensor_in_the_model_is_a_candidate(as_kept):
    class Hooks(Assembled):
        def forward(self, x):
            h = self.a(x)
            h.register_hook(lambda gradient: gradient * NAN)
            return self.b(h)

    verdict = verdict_of(Hooks(a=nn.Linear(3, 3), b=nn.Linear(3, 1)), mean_of)
    assert verdict.first.kind == "gradient"
    as_kept(verdict.origin.maker)


def test_gradients_that_were_there_before_are_candidates(as_kept):
    model = mlp()
    model[0].weight.grad = torch.full((3, 3), NAN)
    as_kept(verdict_of(model, mean_of).origin.maker)


# Weights that may have been written or replaced within the step.


def test_a_weight_that_stands_in_for_a_finite_one_was_not_bad_before(as_kept):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

    def loss_of(model):
        fast = {name: p * NAN for name, p in model.named_parameters()}
        return torch.func.functional_call(model, fast, (inputs(),)).mean()

    verdict = verdict_of(model, loss_of)
    assert (verdict.origin.how, verdict.origin.source) == ("unclear", "unclear")
    as_kept(verdict.origin.maker)
    assert verdict.first.is_finite_now
    as_kept(what_of(verdict.first))


def test_a_tied_weight_that_is_bad_is_not_called_finite_under_its_other_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    del model[0].weight
    model[0].register_parameter("weight", model[1].weight)
    model.forward = lambda x: model[1](x)  # by its second name alone
    with torch.no_grad():
        model[1].weight[0, 0] = NAN
    verdict = verdict_of(model, lambda model: model(inputs()).mean())
    assert (verdict.origin.source, verdict.first.is_finite_now) == ("weight", False)


@pytest.mark.explains
def test_a_weight_that_a_forward_wrote_was_not_bad_before(as_kept):
    class Writes(Assembled):
        def forward(self, x):
            self.fc.weight.data.mul_(NAN)
            return self.fc(x)

    report = report_of(Writes(fc=nn.Linear(3, 1)), mean_of)
    as_kept(report.verdict.origin.candidates)
    assert "mul_(NAN)" in report.explanation.op.code


# Values that a module leaves in an attribute.


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_module_that_left_a_nan_in_an_attribute_is_a_candidate(in_a_list):
    class Gate(nn.Module):
        def forward(self, x):
            aux = (x.detach() * INF - INF).sum()
            self.aux = [aux] if in_a_list else aux
            return x

    class Net(Assembled):
        def forward(self, x):
            y = self.head(self.gate(x)).mean()
            return y + (self.gate.aux[0] if in_a_list else self.gate.aux)

    verdict = verdict_of(Net(gate=Gate(), head=nn.Linear(3, 1)), lambda m: m(inputs()))
    assert (verdict.origin.how, verdict.origin.candidates) == (
        "unclear",
        ["the model", "gate"],
    )


def lines_run(function):
    """Counts the lines of the package that run in a function."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if "overflow_fast" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    "make",
    [
        lambda n: nn.Sequential(*[nn.Identity() for _ in range(n)], nn.Linear(4, 1)),
        lambda n: nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(n // 3)],
            nn.Linear(4, 1),
        ),
    ],
)
def test_the_work_of_a_bad_step_grows_as_the_number_of_modules(make):
    def work(n):
        model = make(n)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with OverflowGuard(model, optimizer, "skip", explain=False):
            model(torch.full((2, 4), NAN)).sum().backward()
            return lines_run(optimizer.step)

    few, many = work(150), work(1200)
    assert many < 12 * few
