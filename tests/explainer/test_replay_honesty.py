"""A replay that is finite, or differs, is no reason to say more than is known."""

import itertools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from assembled import Assembled
from guarding import report_from
from remedied_files import module_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer import search

pytestmark = pytest.mark.usefixtures("untried")

# Globals that no step changes, though they are not equal to themselves.
REAL, IMAGINARY = float("nan"), complex(0.0, float("nan"))


def data():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def explained(model, loss, optimizer=None, between=lambda: None, runs=True, steps=1):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as error:
            for _ in range(steps):
                optimizer.zero_grad()
                # What is not made in the line of the backward is not made again.
                made = [guard.run(loss) if runs else loss()]
                made.pop().backward()
                between()
                optimizer.step()
    return error.value.report.explanation


def net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers)


@pytest.mark.tries_remedies
def test_gradients_that_clipping_has_spoiled():
    model, x = net(), data()

    def clip():
        total = sum(p.grad.sum() * 0 for p in model.parameters())
        for parameter in model.parameters():
            parameter.grad.div_(total)

    found = explained(model, lambda: model(x).pow(2).mean(), between=clip)
    assert (found.phase, found.cause) == ("", "unknown")
    assert "clipping" in found.notes[0]


def test_an_error_in_a_detail_leaves_what_is_known(monkeypatch):
    monkeypatch.setattr(search, "drift_of", lambda *_: [][0])
    model, x = net(), data()
    x[1] = 1e30
    found = explain(model, x, lambda x: model(x).pow(2).mean())
    assert (found.op.name, found.op.line > 0) == ("aten.pow.Tensor_Scalar", True)
    assert (found.cause, found.sample) == ("range overflow", 1)
    assert "ended early: IndexError" in found.notes[-1]


def test_one_bad_gradient_among_good_ones_is_a_fault():
    model, x = net(), data()

    def fault():
        model[0].weight.grad[0, 0] = torch.nan

    found = explained(model, lambda: model(x).pow(2).mean(), between=fault)
    assert (found.cause, found.tensor) == ("not reproducible", "0.weight")


@pytest.mark.tries_remedies
def test_a_bad_gradient_from_outside_that_the_model_stops():
    model, x = net(nn.ReLU()), data()
    model[0].bias.data.fill_(-99.0)

    def loss():
        return (model(x).sum() / model(x).sum()).mean()

    found = explained(model, loss, runs=False)
    assert (found.phase, found.cause) == ("", "unknown")
    assert "was given" in found.notes[0] and "guard.run" in found.notes[1]


class Spoils(torch.optim.SGD):
    """Makes weights bad by gradients that are no longer there afterwards.

    Not in its first steps, in which the update itself is judged.
    """

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["num"] = state.get("num", 0) + 1
                if state["num"] > 2:
                    parameter.data += (-parameter.grad.abs()).sqrt()


def test_a_weight_that_an_update_has_spoiled_was_not_bad_before(as_kept):
    model, x = net(), data()
    optimizer = Spoils(model.parameters(), lr=0.0)
    found = explained(model, lambda: model(x).pow(2).mean(), optimizer, steps=4)
    assert (found.phase, found.cause, found.tensor) == ("", "unknown", "0.weight")
    as_kept(found.evidence[0])


def test_what_called_the_guard_is_no_line_of_the_model():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), data()
    model[1].weight.data.fill_(1e38)
    found = explained(model, lambda: 1e3 * model(x).mean(), runs=False)
    assert found.op is not None and found.op.line == 0 and not found.op.stack


class Ends(Assembled):
    """A model that returns its loss, made by a function of a linear layer's output."""

    def forward(self, x):
        return self.end(self.layer(x))


@pytest.mark.parametrize(
    "end",
    [
        lambda h: ((-h.abs() - 1) * 1e5).half().float().mean(),
        lambda h: torch.log(h * 0).mean(),
        lambda h: (-h.abs() - 1).mul(1e30).mul(1e30).mean(),
    ],
)
def test_a_loss_of_minus_inf_is_found_in_the_forward(end):
    found = explain(Ends(layer=nn.Linear(4, 4), end=end), torch.randn(6, 4))
    assert found.phase == "forward" and found.op is not None, found
    assert found.cause in ("range overflow", "undefined")


def test_a_step_without_a_backward_is_not_said_to_be_finite(as_kept):
    x = torch.randn(6, 4)
    for loss in (None, lambda model, batch: None):
        found = explain(nn.Linear(4, 2), x, loss)
        assert str(found).startswith("The forward is finite when it is run.")
        as_kept(found.notes)


def test_an_output_with_minus_inf_is_not_said_to_be_finite(as_kept):
    model = nn.Linear(4, 2)
    model.bias.data.fill_(-torch.inf)
    found = explain(model, torch.randn(6, 4))
    assert found.cause != "not reproducible"
    as_kept(found.notes)


@pytest.mark.tries_remedies
def test_gradients_that_were_there_before_the_first_step(as_kept):
    model, x = net(nn.Linear(4, 1)), data()
    model[0].weight.grad = torch.full((4, 3), torch.nan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = OverflowGuard(model, optimizer)
    guard.run(lambda: model(x).mean()).backward()
    found = report_from(optimizer.step).explanation
    assert (found.phase, found.cause, found.module) == ("", "unknown", "")
    as_kept(found.notes[0])


def test_gradients_that_are_kept_over_good_steps_are_no_excuse():
    model, x = net(nn.Linear(4, 1)), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = OverflowGuard(model, optimizer)
    for number in range(2):
        guard.run(lambda: model(x).mean()).backward()
        if number == 0:
            optimizer.step()
    model[0].weight.grad[0, 0] = torch.nan
    found = report_from(optimizer.step).explanation
    assert found.is_behind_backward and "= torch.nan" in found.op.code


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("call", ["the model", "a part of it"])
def test_an_overflow_that_the_loss_hides_is_explained_in_either_direction(sign, call):
    """The loss and all gradients are finite: exp(-inf) is 0."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 1, bias=False)
            self.body.weight.data.fill_(-3e38 * sign)

        def forward(self, x):
            return (self.body(x) * sign).exp().mean()

        def compute(self, x):
            return Hidden.forward(self, x)

    model = Hidden()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = model if call == "the model" else model.compute
    with OverflowGuard(model, optimizer, "warn") as guard:
        loss = guard.run(lambda: method(torch.full((3, 2), 5.0)))
        assert float(loss.detach()) == 0
        loss.backward()
        optimizer.step()
    report = guard.last_report
    assert report.explanation.cause == "range overflow"
    assert report.explanation.op.name == "aten.mm"
    assert "What to try" not in str(report)


@pytest.mark.tries_remedies
@pytest.mark.parametrize("is_in_run", [True, False])
def test_a_flag_that_the_loop_sets_between_forwards(is_in_run, as_kept):
    """A replay runs without it, so a finite one tells nothing of the step."""

    class Model(Assembled):
        def forward(self, x):
            y = self.linear(x)
            return (y * 0).abs().sqrt() + y if self.is_last else y

    model = Model(linear=nn.Linear(4, 4).half(), is_last=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with OverflowGuard(model, optimizer) as guard:
        for is_last in (False, True):
            model.is_last = is_last
            x = torch.randn(3, 4).half()
            if is_in_run:
                loss = guard.run(lambda x=x: model(x).float().mean())
            else:
                loss = model(x).float().mean()
            loss.backward()
        found = report_from(optimizer.step).explanation
    assert found.cause == "unknown", found
    (note,) = found.notes
    as_kept(note)
    assert not model.linear.weight.isnan().any() and model.is_last


@pytest.mark.tries_remedies
def test_what_a_model_draws_from_is_not_said_to_be_set_by_the_program(as_kept):
    class Model(Assembled):
        def forward(self, x):
            y = self.linear(x) * next(self.noise)
            return (y / (0.0 if next(self.count) == 1 else 1.0)).sum()

    model = Model(
        linear=nn.Linear(2, 2), noise=iter(lambda: 1.0, None), count=itertools.count()
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for _ in range(2):
            model(torch.ones(1, 2)).backward()
            optimizer.step()
    found = guard.last_report.explanation
    assert found.cause == "unknown"
    assert "the program set" not in str(found)
    as_kept(found.notes)
    assert repr(model.count) == "count(2)"


def test_infinities_that_the_loop_computed_are_no_mask(as_kept):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip") as guard:
        model.weight.data.zero_()
        y = (model(torch.ones(1, 2)) - model.bias).abs().log()
        guard.run(lambda: y.softmax(-1).sum()).backward()
        optimizer.step()
    found = guard.last_report.explanation
    assert found.tensor == "y"
    assert "mask" not in str(found)
    as_kept(found.evidence)


class Directions(Assembled):
    """Divides by a norm, which is 0 for a sample of zeros."""

    def forward(self, x):
        h = self.linear(x)
        return h / h.norm(dim=-1, keepdim=True)


@pytest.mark.tries_remedies
def test_a_remedy_is_not_said_to_fail_where_its_result_is_not_used(as_kept):
    """The loss is computed of an output from outside, whatever a replay changes."""
    model = Directions(linear=nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0]])
    with OverflowGuard(model, optimizer) as guard:
        output = model(x)
        guard.run(lambda: output.square().mean()).backward()
        found = report_from(optimizer.step).explanation
    assert (found.cause, found.sample) == ("undefined", 1)
    assert "did not help" not in str(found)
    as_kept(found.notes)


@pytest.mark.tries_remedies
def test_a_loss_of_an_output_from_outside_is_run_again(as_kept):
    """Its graph was freed by the step's own backward, and is not needed."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with OverflowGuard(model, optimizer) as guard:
        h = model(torch.randn(2, 4))
        h.square().mean().backward(retain_graph=True)
        guard.run(lambda: (h - h.detach()).square().sum().sqrt()).backward()
        found = report_from(optimizer.step).explanation
    assert "a second time" not in str(found)
    as_kept(found.notes)


class Undefined(nn.Module):
    """Takes the logarithm of a negative number in its first column."""

    def __init__(self, then):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.then = nn.Linear(3, 3), Then(then)

    def forward(self, x):
        sizes = self.fc(x).abs()
        return self.then(torch.log(torch.cat([-1 - sizes[:, :1], 1 + sizes], 1)))


class Then(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LEAVES_OUT = {
    "masked_fill": lambda x: x.masked_fill(x.isnan(), 0.0),
    "where": lambda x: torch.where(x.isnan(), 0.0, x),
    "nan_to_num": torch.nan_to_num,
    "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)),
    "slice": lambda x: x[:, 1:],
    "index": lambda x: x[:, [1, 2]],
    "nansum": lambda x: x.nansum(1),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "split": lambda x: x.split([1, 3], 1)[1],
    "nanmean": lambda x: x.nanmean(1),
}


@pytest.mark.slow
@pytest.mark.tries_remedies
@pytest.mark.parametrize("name", LEAVES_OUT)
def test_what_the_next_module_leaves_out_is_found_within_the_step(name):
    model, x = Undefined(LEAVES_OUT[name]), data()
    found = explained(model, lambda: model(x).square().mean())
    assert (found.phase, found.cause) == ("forward", "undefined")
    assert (found.op.name, found.op.file) == ("aten.log", __file__)
    assert found.sample is None  # it is of each
    for remedy in found.remedies:  # one that changes what is masked helps nothing
        if "leave values out" not in remedy.text:  # before it is masked
            assert remedy.is_finite == ("logarithm" in remedy.text)


@pytest.mark.slow
@pytest.mark.tries_remedies
@pytest.mark.parametrize("lasts", [False, True])
def test_what_is_allowed_in_another_module_is_not_blamed(lasts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.marks = Then(lambda x: torch.log(x * 0 - 1))
            self.then = Then(torch.nan_to_num)
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            x = torch.where(self.marks(x).isnan(), x, 0)
            if faults and (lasts or faults.pop()):
                x = torch.sqrt(x - 9)
            return self.then(x) + self.fc(torch.ones(4, 3))

    faults, model, x = [], Model(), data().abs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(
        model, optimizer, "skip", allow={"marks:output": "nan"}
    ) as guard:
        for number in range(3):
            faults += [True] * (number == 2)
            guard.run(lambda: model(x).square().mean()).backward()
            optimizer.step()
    found = guard.last_report.explanation
    assert guard.num_skipped == 1
    if not lasts:
        assert found.cause == "not reproducible"
    else:
        assert (found.cause, found.op.name) == ("undefined", "aten.sqrt")
        assert any(each.is_finite for each in found.remedies)


def test_one_sample_of_what_is_left_out_is_named():
    class Model(Assembled):
        def forward(self, x):
            return self.then(torch.log(x[:, :1]) + self.fc(x))

    model, x = Model(fc=nn.Linear(3, 3), then=Then(torch.nan_to_num)), data().abs()
    x[2, 0] = -1
    found = explained(model, lambda: model(x).square().mean())
    assert (found.cause, found.sample, found.num_samples) == ("undefined", 2, 4)


RAN = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 1)
    def forward(self, x):
        # a comment
        y = torch.log(x[:, :1])
        return y.mean() + self.fc(x).mean()
"""
EDITS = {
    "another operation": RAN.replace("log(x[:, :1])", "sqrt(x[:, :1].clamp(min=0))"),
    "lines above": f"# one\n# two\n{RAN}",
    "a line less": RAN.replace("        # a comment\n", ""),
    "emptied": "",
    "none": RAN,
}


@pytest.mark.tries_remedies
@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("edit", EDITS)
def test_no_line_is_shown_of_a_file_that_has_another_text_now(edit, is_old, tmp_path):
    module, path = module_of(tmp_path, RAN)
    model, x = module.Model(), 0 * data()

    def loss():
        path.write_text(EDITS[edit])
        if is_old:  # as `mv`, `cp -p` and `tar x` leave it
            os.utime(path, (1e9, 1e9))
        return model(x)

    found = explained(model, loss, runs=False)
    assert found.op.name == "aten.log"
    lines = [found.op.code, *(each.file for each in found.remedies)]
    assert any(lines) == (edit == "none")
    assert any(each.is_finite for each in found.remedies)


@pytest.mark.parametrize("hides", ["in the loss", "by a division"])
def test_what_arises_in_the_forward_is_not_said_to_be_of_backward(hides, as_kept):
    model, labels = net(), torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        model[0].bias[3] = -150.0 if hides == "in the loss" else 150.0

    def loss():
        out = model(data())
        if hides == "in the loss":  # nobody's label is 3
            return F.nll_loss(torch.log(out.softmax(1) * 1.0), labels)
        return (out / out.exp().sum(1, keepdim=True)).sum()

    found = explained(model, loss)
    assert found.op.name == ("aten.log" if hides == "in the loss" else "aten.exp")
    as_kept(found.words.gist(), found.notes)  # a derivative fails as well


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_only_a_mean_of_losses_divides_by_weights(reduction):
    model, labels = net(), torch.tensor([0, 1, 2, 0])
    weights = torch.tensor([3.0, 4.0, 5.0, 6.0])

    def loss():
        scores = model(data()) * 1e-9 + 3e38
        return F.nll_loss(scores, labels, weights, reduction=reduction).sum()

    found = explained(model, loss)
    assert found.cause == "range overflow"
    assert "which is 0" not in f"{found.reason} {found.evidence}"


@pytest.mark.parametrize("forwards", [0, 1, 4])
def test_earlier_forwards_of_the_step_do_not_change_the_cause(forwards):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Softmax(1)), data()
    x[2] *= 3000

    def loss():
        return -torch.log(model(x)).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for _ in range(forwards):
            model(x)
        guard.run(loss).backward()
        optimizer.step()
    found = guard.last_report.explanation
    assert (found.cause, found.op.name) == ("underflow", "aten.log")
    if found.sample is None:
        assert "budget" in " ".join(found.notes)
    else:
        assert (found.sample, "times the largest" in found.sample.outlier) == (2, True)


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_batch_of_a_class_that_hands_calls_on():
    class Model(Assembled):
        def forward(self, x):
            return self.fc(x) + torch.log(x.mean(1, keepdim=True))

    model, x = Model(fc=nn.Linear(3, 4)), -data().abs().as_subclass(Named)
    found = explained(model, lambda: model(x).mean())
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert "torch.log(x.mean" in found.op.code
    assert found.op.inputs[0].abs_max is not None


WRITES = {
    "batch_norm": lambda h, mean, var: F.batch_norm(h, mean, var, training=True),
    "lerp_": lambda h, mean, var: h - mean.lerp_(h.detach().mean(0), 0.1),
    "data": lambda h, mean, var: h - mean.data.lerp_(h.detach().mean(0), 0.1),
    "numpy": lambda h, mean, var: h - written_by_numpy(mean, h),
}


def written_by_numpy(mean, h):
    mean.numpy()[:] = h.detach().mean(0).numpy()
    return mean


@pytest.mark.parametrize(
    "how, runs", [*((how, False) for how in WRITES), ("batch_norm", True)]
)
def test_what_the_forward_writes_to_is_not_said_to_be_bad_before_it(how, runs, as_kept):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(3, 3)

        def forward(self, x, mean, var):
            return WRITES[how](torch.log(self.fc(x).abs() - 1e3), mean, var)

    model, mean, var = Model(), torch.zeros(3), torch.ones(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with OverflowGuard(model, optimizer, "skip") as guard:
        loss = lambda: model(data(), mean, var).square().mean()  # noqa: E731
        (guard.run(loss) if runs else loss()).backward()
        optimizer.step()
    report = guard.last_report
    assert report.explanation.cause in ("unknown", "undefined")
    as_kept(report.headline(), report.verdict.origin.maker)


COUNTED = """
import itertools
import torch
from torch import nn

NUMBER, CALLS, TABLE = 0, [], {}
COUNT = itertools.count(1)

class Stats:
    n, seen = 0, []

def number():
    global NUMBER
    NUMBER += 1
    return NUMBER

def of_list():
    CALLS.append(1)
    return len(CALLS)

def of_dict():
    TABLE["n"] = TABLE.get("n", 0) + 1
    return TABLE["n"]

def of_class():
    Stats.n += 1
    return Stats.n

def of_its_list():
    Stats.seen.append(1)
    return len(Stats.seen)

def by_globals():
    globals()["NUMBER"] += 1
    return NUMBER

def nothing():
    return 0

class Net(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.a, self.count = nn.Linear(6, 6), count

    def forward(self, x):
        n = self.count()
        return self.a(x) + torch.log(x.mean(1, keepdim=True) - (2 if n == 2 else 0))
"""


@pytest.mark.parametrize(
    "name, held",
    [
        *[("number", "NUMBER"), ("of_list", "CALLS"), ("of_dict", "TABLE")],
        *[("of_class", "Stats.n"), ("of_its_list", "Stats.seen")],
        *[("by_globals", "NUMBER"), ("COUNT.__next__", "itertools.count()")],
    ],
)
def test_a_count_that_the_program_holds_may_be_why_a_replay_is_finite(
    name, held, tmp_path, monkeypatch
):
    module, _ = module_of(tmp_path, COUNTED)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    first, _, rest = name.partition(".")
    count = getattr(module, first)
    model = module.Net(getattr(count, rest) if rest else count)
    found = explained(model, lambda: model(torch.ones(4, 6)).mean(), steps=2)
    assert (found.cause, found.op) == ("unknown", None)
    assert f"`{held}`" in found.notes[0]


def change_class(model):
    class Other(type(model)):
        def forward(self, x):
            return self[0](x)

    model.__class__ = Other


def add_hook(model):
    model.register_forward_pre_hook(lambda module, args: (args[0].abs(),))


@pytest.mark.parametrize("change", [change_class, add_hook])
def test_a_model_that_was_changed_behind_backward_may_be_why(change, as_kept):
    class Logarithm(nn.Sequential):
        def forward(self, x):
            return self[0](x) + x.mean(1, keepdim=True).log()

    model = Logarithm(nn.Linear(3, 1))
    loss = lambda: model(-torch.ones(4, 3)).mean()  # noqa: E731
    found = explained(model, loss, between=lambda: change(model))
    assert found.cause == "unknown"
    as_kept(found.notes[0])


class Logarithm(Assembled):
    def forward(self, x):
        return -x.abs().log()


def test_what_a_module_was_seen_to_return_is_no_derivative():
    """The loss leaves it out, and the gradients that come of it are bad, too."""
    model, x = net(Logarithm()), data()
    nn.init.zeros_(model[0].bias)
    x[1] = 0

    def loss():
        y = model(x)
        return y[y.isfinite()].mean()

    found = explained(model, loss)
    assert (found.phase, found.cause, found.module) == ("forward", "undefined", "1")
    assert found.op.derivative == "" and found.op.operands == [0.0]


@pytest.mark.tries_remedies
def test_a_pole_is_not_beyond_the_one_beside_it():
    model = nn.Linear(1, 1, bias=False)
    found = explain(model, torch.zeros(2, 1), lambda x: model(x).lgamma().sum())
    assert found.op.operands == [0.0] and found.reason == "`batch[0, 0]` is 0"
