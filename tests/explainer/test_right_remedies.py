"""A remedy is judged by what is right, by what follows, and by what it costs."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from assembled import Assembled
from remedied_files import Holder, edited, explained, module_of
from torch import nn
from torch.nn import functional as F

from overflow_fast import NonFiniteError, OverflowGuard, explain
from overflow_fast.explainer.calls import Call
from overflow_fast.explainer.explain_origin import tell_float64
from overflow_fast.explainer.remedies.attempts import _rank, note_rounding
from overflow_fast.explainer.remedies.failure import Failure
from overflow_fast.explainer.remedies.rules import LINKS
from overflow_fast.explainer.remedies.true_step import Truth, in_float64
from overflow_fast.explainer.replayer import Replayer, ReplayResult, StepPart
from overflow_fast.explainer.torch_calls import TorchCall
from overflow_fast.guard.kept_calls.ambient import Ambient
from overflow_fast.guard.report.causes import EMPTY_REDUCTION
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.op import Op, TensorSummary
from overflow_fast.guard.report.op_words import in_float64_text
from overflow_fast.guard.report.remedy import Elsewhere, Remedy, Worth
from overflow_fast.options import Explain


def stopped(model, loss_of, batches, optimizer=None, budget=8):
    """The explanation of the first bad step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, explain=Explain("always", budget=budget))
    with pytest.raises(NonFiniteError) as error:
        for batch in batches:
            optimizer.zero_grad()
            guard.run(lambda batch=batch: loss_of(model, batch)).backward()
            optimizer.step()
    guard.remove()
    return error.value.report.explanation


def scaled_sums(model, x):
    w = torch.exp(-F.softplus(model(x)).cumsum(1))
    return (w * torch.cumsum(x / w, 1)).pow(2).mean()


@pytest.mark.slow
def test_what_misses_the_true_loss_comes_after_what_does_not_and_says_by_how_much():
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1), torch.randn(4, 64, 2)
    nn.init.constant_(model.bias, -3.0)
    x[2] *= 12
    found = stopped(model, scaled_sums, [x], budget=16)
    tried = [each for each in found.remedies if each.keeps_running]
    right, *others = [each for each in tried if not each.is_of_data]
    wide = nn.Linear(2, 1).double()
    wide.load_state_dict(model.state_dict())
    truth = scaled_sums(wide, x.double()).item()
    assert right.is_right and right.loss == pytest.approx(truth, rel=1e-4)
    missing = [each for each in others if not each.leaves]
    assert missing
    for each in missing:
        assert each.misses == "loss" and each.true_loss == pytest.approx(truth)
        assert each.error == pytest.approx(abs(each.loss - truth) / truth, rel=1e-3)
        assert f"off the true {truth:.4g}" in each.outcome
        assert each.is_recommended == (each.error <= 0.1) == (not each.harm)
    assert found.nearest is None  # for one is right


@pytest.mark.slow
def test_what_float64_has_is_computed_in_it_from_where_it_was_lost():
    model, x = Holder(), torch.full((3, 2), 1e-25)  # whose square is 0 in float32

    def ratio(x):
        return (x * model.w[0]).square().sum().sqrt() / (
            (x * model.w[1]).square().sum().sqrt()
        )

    found = explain(model, x, ratio)
    assert found.cause == "rounding"  # and no sum of nothing: float64 has it
    assert found.remedies[0].is_right and "in float64" in found.remedies[0].text


SLICES = """
import torch

def log_sub_exp(a, b):
    m = torch.maximum(a, b)
    return torch.log(torch.exp(a - m) - torch.exp(b - m)) + m

def logsumexp_of_slices(x):
    y = torch.logcumsumexp(x, 0)
    return log_sub_exp(y[1:], y[:-1])

def loss_of(x, w):
    x = x * w[:1]
    return (logsumexp_of_slices(x) - logsumexp_of_slices(x / 2)).mean()
"""


def test_a_function_that_runs_twice_is_in_float64_from_where_a_value_was_lost(tmp_path):
    """No further call is, and none of it is cast back before the one that failed."""
    module, _ = module_of(tmp_path, SLICES)
    x = torch.tensor([3.0, -20.0, 2.0])
    found = explained(module.loss_of, x)
    truth = module.loss_of(x.double(), Holder().w.double()).item()
    (right,) = [e for e in found.remedies if e.is_recommended and e.in_float64]
    assert "`torch.logcumsumexp" in right.text
    assert right.loss == pytest.approx(truth)


def of_a_sure_class():
    """The logarithm of a softmax that gives the other classes 0, in float64 too."""
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 1e4, 0.0]))
    y = torch.tensor([0, 2])
    return explain(
        model, torch.randn(2, 3), lambda x: F.nll_loss(model(x).softmax(1).log(), y)
    )


def test_the_truth_is_that_of_an_exact_form_where_float64_fails_as_well():
    found = of_a_sure_class()
    right, clamped = [each for each in found.remedies if each.keeps_running][:2]
    assert right.is_right and right.loss == pytest.approx(1e4)
    assert (
        not clamped.is_recommended
        and clamped.misses == "loss"
        and clamped.true_loss == pytest.approx(1e4)
    )


def test_where_nothing_keeps_the_value_the_nearest_is_told_as_such(as_kept):
    model, x = Holder(), torch.full((3, 2), 100.0)
    found = explain(model, x, lambda x: (x * model.w).exp().sum())
    nearest = found.nearest
    assert not nearest.is_recommended
    assert nearest.misses == "loss" and nearest.error is None  # beyond float32
    last = str(found).splitlines()[-2:]
    as_kept(last[0])
    assert last[1].strip() == nearest.code
    assert "tried     clamp" not in str(found)


def test_the_nearest_is_that_whose_loss_is_nearest_of_those_that_have_code():
    def far(loss, code="y"):
        facts = {"misses": "loss", "true_loss": 9.0, "error": 1 - loss / 9}
        return Remedy(f"give {loss}", code, is_finite=True, loss=loss, **facts)

    found = Explanation(remedies=[far(1.0), far(5.0), far(7.0, code="")])
    assert found.nearest.loss == 5.0
    (told,) = [row for row in found.words.rows() if row.startswith("nearest")]
    assert "that has code" in told
    found.remedies.pop()
    (told,) = [row for row in found.words.rows() if row.startswith("nearest")]
    assert "the nearest:" in told


def test_of_equally_near_changes_one_in_float64_is_not_the_one_that_is_told():
    off = {"is_finite": True, "tried": True, "code": "y", "misses": "gradients"}
    wide = Remedy("float64 over five lines", error=0.901, in_float64=True, **off)
    plain = Remedy("divide by 1e-8", error=0.903, **off)
    assert Explanation(remedies=[wide, plain]).nearest is plain
    near = replace(wide, error=0.6)
    assert Explanation(remedies=[near, plain]).nearest is near


def test_an_error_that_is_no_share_of_the_true_loss_is_not_written_as_one(as_kept):
    near_zero = Remedy("a", is_finite=True, loss=1.0, misses="loss", true_loss=0.0)
    share = replace(near_zero, true_loss=2.0, error=0.5)
    as_kept(
        replace(near_zero, error=1e4).outcome,
        share.outcome,
        replace(share, rank=1).outcome,
    )


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_the_step_in_float64_draws_what_the_step_draws_or_is_not_run(kind):
    model = nn.Sequential(nn.Linear(8, 64), kind(0.5), nn.Linear(64, 1))
    x = torch.randn(4, 8)

    def loss_of(x):
        noise = torch.randn(4, 1) + torch.randn_like(x[:, :1])
        return (model(x) + noise).square().mean()

    call = Call(loss_of, x, Ambient(model, []))
    call.returns_loss = True
    with Replayer({"": model}, [call]) as replayer:
        plain = replayer.run(StepPart(traced=0, has_calls=True))
        patch = in_float64(plain.table)
        if patch is None:
            assert kind is nn.AlphaDropout
            return
        wide = replayer.run(patches=[patch])
    assert wide.error is None and wide.losses[0].dtype == torch.float64
    assert float(wide.losses[0]) == pytest.approx(float(plain.losses[0]), rel=1e-5)
    assert wide.gradients["0.weight"].dtype == torch.float64
    assert model[0].weight.dtype == torch.float32 and model[0].weight.grad is None


def test_a_loss_of_a_size_that_the_run_never_had_is_no_remedy():
    def loss_of(model, batch):
        x, number = batch
        return model(x).abs().sum() / torch.tensor(number)

    x = torch.ones(3, 2)
    found = stopped(nn.Linear(2, 1), loss_of, [(x, 4.0)] * 3 + [(x, 0.0)])
    huge = [each for each in found.remedies if each.is_finite and each.breaks]
    assert huge and not any(each.is_recommended for each in huge)
    assert all("after a median" in each.breaks for each in huge)
    assert "did not help" in str(found)


def test_no_two_lines_of_torch_itself_are_to_be_changed():
    """A scale of 0 is a logarithm's argument, and a divisor a line below."""

    def loss(model, x):
        scale = torch.relu(model.w[0] * x)
        normal = torch.distributions.Normal(0.0, scale, validate_args=False)
        return -normal.log_prob(x + 3).mean()

    batches = [torch.ones(3, 2)] * 3 + [torch.tensor([[1.0, -1.0]])]
    found = stopped(Holder(), loss, batches)
    assert not any("installed), and" in each.text for each in found.remedies)
    assert found.remedies[0].text.startswith("clamp the result of `torch.relu(")


def test_one_loss_that_was_huge_does_not_make_others_usual():
    def loss_of(model, batch):
        x, number = batch
        return model(x).abs().sum() / torch.tensor(number)

    x, model = torch.ones(3, 2), nn.Linear(2, 1)
    numbers = (4.0, 1e-9, 4.0, 4.0, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-15)
    found = stopped(model, loss_of, [(x, each) for each in numbers], optimizer)
    huge = [each for each in found.remedies if each.is_finite and each.loss > 1e6]
    assert huge and not any(each.is_recommended for each in huge)


class ReturnsLoss(Assembled):
    def forward(self, x, number):
        return self.linear(x).abs().sum() / number


def test_the_loss_that_a_model_returns_has_the_size_that_it_had():
    x = torch.ones(3, 2)
    batches = [(x, torch.tensor(number)) for number in (4.0, 4.0, 0.0)]
    found = stopped(
        ReturnsLoss(linear=nn.Linear(2, 1)), lambda model, batch: model(*batch), batches
    )
    huge = [each for each in found.remedies if each.is_finite and each.breaks]
    assert huge and not any(each.is_recommended for each in huge)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(4.0, 4.0, 0.0), (4.0, 1e-9, 4.0, 4.0, 0.0)])
def test_gradients_of_a_size_that_the_run_seldom_had_are_no_remedy(numbers, as_kept):
    """The loss is computed outside of the model, so that nobody knows what it was."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-15)
    guard = OverflowGuard(model, optimizer, explain=True)
    with pytest.raises(NonFiniteError) as caught:
        for number in numbers:
            loss = model(torch.ones(3, 2)).abs().sum() / torch.tensor(number)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    guard.remove()
    found = caught.value.report.explanation
    huge = [each for each in found.remedies if each.breaks]
    assert huge and not any(each.is_recommended for each in huge)
    as_kept(huge[0].breaks)


def test_a_count_of_zero_counts_as_one():
    def loss_of(model, batch):
        x, crops = batch
        return model(x).abs().sum() / crops

    x = torch.ones(3, 2)
    found = stopped(nn.Linear(2, 1), loss_of, [(x, 4)] * 3 + [(x, 0)])
    assert found.remedies[0].code.endswith("/ max(crops, 1)")
    assert found.remedies[0].is_right


TWINS = """
import torch
import torch.nn.functional as F

def loss_of(x, w):
    p = torch.sigmoid(x * w)
    return -(
        torch.log(p)
        + torch.log(1 - p)
    ).mean()
"""


def test_the_same_form_a_line_below_is_changed_with_it(tmp_path):
    module, _ = module_of(tmp_path, TWINS)
    first = explained(module.loss_of, torch.full((3, 2), -200.0)).remedies[0]
    assert first.is_right and first.code.count("F.logsigmoid(") == 2
    assert (first.line, first.last_line) == (8, 9)
    alone = explained(module_of(tmp_path, TWINS.replace("1 - p", "p.abs()"))[0].loss_of,
                      torch.full((3, 2), -200.0))  # fmt: skip
    assert math.isfinite(alone.remedies[0].loss)


def test_a_clamp_says_that_no_gradient_goes_through_where_it_acts(as_kept):
    model = Holder()
    x = torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    found = explain(model, x, lambda x: (x * model.w).log().mean())
    (clamp,) = [each for each in found.remedies if "clamp" in each.text][:1]
    assert clamp.stops_gradient
    as_kept(clamp.outcome)
    found = explain(model, x * 0, lambda x: (x * model.w).log().mean())
    flat = found.remedies[0]
    assert flat.is_flat
    as_kept(flat.outcome)


def test_others_are_compared_in_the_step_that_leaves_the_sample_out():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 200), nn.Dropout(0.5), nn.Linear(200, 5))
    x, y = torch.randn(12, 20) * 3, torch.arange(12) % 5
    x[4] *= 3000
    state = torch.get_rng_state()

    def loss_of(batch):
        x, y = batch
        return F.nll_loss((net(x).softmax(1) ** 0.5).log(), y)

    found = explain(net, (x, y), loss_of)
    assert found.sample == 4
    torch.set_rng_state(state)
    others = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    expected = loss_of((x[others], y[others]))
    moved = [each.elsewhere for each in found.remedies if each.elsewhere is not None]
    assert moved and all(each.left_out == 4 for each in moved)
    assert moved[0].losses[0] == pytest.approx(expected.item(), rel=1e-4)
    (left_out,) = [each for each in found.remedies if each.text.startswith("leave")]
    assert moved[0].losses[0] == left_out.loss  # of one run


def test_what_the_last_clean_batch_is_not_finite_with_is_no_remedy():
    def loss_of(model, x):
        return (model(torch.ones(2, 2)).flatten() * x**-1).sum()

    clean, bad = torch.tensor([-1e-8, 2.0]), torch.tensor([0.0, 1e-7])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = stopped(model, loss_of, [clean, clean, bad], optimizer)
    added = next(each for each in found.remedies if "add 1e-8" in each.text)
    assert "last clean batch" in added.breaks and not added.is_recommended
    assert any(each.is_recommended for each in found.remedies)


def test_statistics_that_the_batch_leaves_are_named():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    x = torch.randn(8, 2)
    x[3] = 1e12

    def loss_of(x):
        net(x)
        return (net[0](x).abs().sum(1).exp()).sum().log()

    found = explain(net, x, loss_of)
    helped = [each for each in found.remedies if each.is_finite]
    assert helped and all("running_" in each.leaves for each in helped)
    assert "before)" in helped[0].outcome


class Balanced(nn.Module):
    """A layer whose results are weighted by their sizes in the step before."""

    def __init__(self):
        super().__init__()
        self.layer, self.weights = nn.Linear(4, 2), torch.ones(2)
        self.register_buffer("shares", torch.ones(2))

    def forward(self, x):
        sizes = self.layer(x).relu().mean(0)
        loss = (self.weights * sizes).sum()
        with torch.no_grad():
            self.weights = 1 / self.shares
            self.shares.copy_(sizes / sizes)
        return loss


def test_what_the_next_steps_are_not_finite_with_is_no_remedy():
    torch.manual_seed(0)
    model = Balanced()
    nn.init.ones_(model.layer.weight)
    x = torch.rand(2, 8, 4)
    found = stopped(
        model, lambda model, x: model(x), [x[0], x[1] - 3 * model.shares[0]]
    )
    first, *others = found.remedies
    assert first.is_recommended and first.text == "take 1 where the divisor is 0"
    later = "it is non-finite within 4 such steps"
    assert later in {each.breaks for each in others}


def test_the_failing_sample_is_left_out_or_clamped_beside_changes_of_code():
    model = nn.Linear(2, 1)
    x = torch.randn(6, 2)
    x[3] *= 1e6
    found = explain(model, x, lambda x: (model(x).abs().exp() + 1).log().mean())
    assert found.sample == 3 and not found.remedies[0].is_of_data
    clamp, drop = [each for each in found.remedies if each.is_of_data]
    assert "x.abs()" in drop.code or "batch.abs()" in drop.code
    others = x[[0, 1, 2, 4, 5]]
    wanted = (model(others).abs().exp() + 1).log().mean()
    assert drop.loss == pytest.approx(wanted.item(), rel=1e-5)
    assert clamp.is_finite and ".clamp(" in clamp.code
    assert clamp.code in str(found) or drop.code in str(found)


def test_a_sample_whose_target_is_as_large_is_left_out_and_not_clamped():
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    x, y = torch.ones(6, 2), torch.ones(6, 1)
    x[3] = y[3] = 1e6
    found = explain(model, (x, y), lambda b: (model(b[0]).abs().exp() - b[1]).sum())
    (drop,) = [each for each in found.remedies if each.is_of_data]
    assert "leave out samples" in drop.text and drop.is_finite


def test_a_failing_sample_that_is_no_larger_is_left_out_in_words(as_kept):
    model = nn.Linear(2, 1, bias=False)
    x = torch.ones(4, 2)
    x[2] = 0
    found = explain(model, x, lambda x: model(x).abs().log().mean())
    (drop,) = [each for each in found.remedies if each.is_of_data]
    assert not drop.code
    as_kept(drop.text)


def test_a_derivative_of_complex_numbers_that_float64_has_is_not_called_singular(
    as_kept,
):
    torch.manual_seed(0)
    model, gain = nn.Linear(4, 4), torch.tensor([[1.0], [1e-25], [1.0]])
    x = torch.randn(3, 4)
    found = explain(
        model, x, lambda x: torch.angle(torch.fft.rfft(gain * model(x))).mean()
    )
    assert (found.phase, found.cause) == ("backward", "rounding")
    as_kept(found.evidence[1])
    assert found.remedies[0].is_right


@pytest.mark.slow
def test_a_whole_batch_of_another_size_is_compared_with_the_steps_before(as_kept):
    torch.manual_seed(0)
    head = nn.Linear(20, 3)
    nn.init.normal_(head.weight)
    batches = [torch.rand(9, 20) * (2550 if step == 5 else 1) for step in range(6)]
    found = stopped(head, lambda m, x: -m(x).softmax(1).log().mean(), batches)
    as_kept(found.news)
    alike = [torch.rand(9, 20) * 2550 for _ in range(2)]
    found = stopped(head, lambda m, x: -m(x).softmax(1).log().mean(), alike)
    assert found.news == ""


@pytest.mark.slow
def test_a_change_of_results_that_were_finite_is_said(as_kept):
    model, x = Holder(), torch.tensor([[0.0, 1e-9], [2e-8, 3e-8], [0.0, 1e-8]])
    found = explain(model, x, lambda x: ((x * model.w).square() + 1).sum().log() + (
        (x * model.w) ** 0.5).sum())  # fmt: skip
    moving = [e for e in found.remedies if e.moves_results and e.moves_results > 1e-3]
    assert moving
    as_kept(moving[0].outcome)
    clamp = explain(model, x, lambda x: ((x * model.w).log() * (x > 0)).sum()).remedies
    assert (clamp[0].moves_results or 0) < 1e-6


def test_gradients_that_are_wrong_are_a_miss_though_the_loss_is_right():
    plain = {"w": torch.tensor([3.0, 4.0])}
    truth = Truth([1.0], plain, near=1e-2)
    remedy = Remedy("", is_finite=True, loss=1.001)

    def compared(*gradient):
        result = ReplayResult(gradients={"w": torch.tensor(gradient)})
        result.losses = [torch.tensor(1.001)]
        return truth.compared(remedy.loss, result, None)

    assert compared(3.0, 4.1)["misses"] == ""
    nothing = Truth([0.0], plain, near=1e-2)
    result = ReplayResult(gradients=plain)
    result.losses = [torch.tensor(0.0)]
    assert nothing.compared(0.0, result, 0.0)["error"] == 0
    found = compared(3.0, 0.0)
    assert found["misses"] == "gradients" and found["error"] == pytest.approx(0.8)
    assert "gradients 80% off" in replace(remedy, **found).outcome


def ratios(model, x):
    terms = torch.exp(model.w * x).clamp(max=8.0) * (x < 50)
    return (terms - terms.mean()).sum()


def advantages(model, x):
    is_kept = x < 50
    gain = torch.where(is_kept, x, 0.0)
    gain = gain - gain.sum() / is_kept.sum()
    ratio = torch.exp2(model.w * x - torch.where(is_kept, x, -x))
    return (torch.minimum(ratio, torch.tensor(1.2)) * gain * is_kept).sum()


@pytest.mark.parametrize("loss_of", [ratios, advantages])
def test_a_loss_of_terms_that_cancel_is_right_as_far_as_the_step_s_own(loss_of):
    """It is rounding alone, in which no remedy comes nearer to that of float64."""
    torch.manual_seed(0)
    x = torch.rand(6, 7, 2)
    x[-1, 0, 0] = 300.0
    model = Holder()
    found = stopped(model, loss_of, x, torch.optim.SGD(model.parameters(), lr=0.0))
    assert "; the forward is finite all the same" in str(found)
    first = found.remedies[0]
    assert first.is_recommended and first.text.startswith("clamp the argument")


def test_a_change_of_a_loss_that_was_finite_is_said():
    """Gradients alone are bad."""
    model, x = Holder(), torch.tensor([[1.0, 0.0], [2.0, 3.0]])
    found = explain(model, x, lambda x: (x * model.w).log().nan_to_num(neginf=0).mean())
    assert found.phase == "backward"
    (clamp,) = (each for each in found.remedies if "clamp" in each.text)
    assert "instead of 0.4479" in clamp.outcome
    assert clamp is not found.remedies[0]


@pytest.mark.parametrize(("near", "first"), [(0.0, 1), (1e-2, 0)])
def test_what_changes_less_than_half_precision_rounds_changes_nothing(near, first):
    """Such as a larger epsilon, which is one number in the line."""
    epsilon = Remedy("", is_finite=True, elsewhere=Elsewhere(moved=0.0018))
    choice = Remedy("", is_finite=True, moves_results=0.0)
    tried = [epsilon, choice]
    assert sorted(tried, key=lambda each: _rank(each, near))[0] is tried[first]


SHARES = """
import torch
@torch.no_grad()
def shares(y):
    q = torch.exp(y)
    q /= q.sum()
    q /= q.sum(1, keepdim=True) * len(q)
    return q
def loss_of(x, w):
    y = x * w
    return (shares(y) * y).sum()
"""


def test_what_leaves_a_divisor_near_0_comes_after_what_does_not(tmp_path, as_kept):
    """The largest score of all rows is subtracted: another row's sum is then near 0."""
    module, path = module_of(tmp_path, SHARES)
    found = explained(module.loss_of, torch.tensor([[90.0, 89.0], [0.0, -1.0]]))
    first, *others = [each for each in found.remedies if each.is_recommended]
    assert first.is_right and first.in_float64
    as_kept(first.code)
    near = [each for each in others if each.leaves]
    assert near and not any(each.is_right for each in near)
    as_kept(near[0].outcome.replace(path.name, "shares.py"))


def test_a_divisor_that_the_code_keeps_from_0_stays_there(tmp_path):
    text = SHARES.replace("keepdim=True)", "keepdim=True).clamp(min=1e-30)")
    module, _ = module_of(tmp_path, text.replace(" * len(q)", ""))
    found = explained(module.loss_of, torch.tensor([[90.0, 89.0], [0.0, -1.0]]))
    assert found.remedies[0].text.startswith("subtract the maximum of all")
    assert not any(each.leaves for each in found.remedies)


def test_the_base_of_a_power_above_1_is_clamped_where_it_is_negative(as_kept):
    model, x = Holder(), torch.tensor([[0.5, 0.5], [-0.01, 0.5]])
    found = explain(model, x, lambda x: ((x * model.w) ** 1.2).sum())
    as_kept(found.remedies[0].text)
    found = explain(model, x / 0, lambda x: ((x * model.w) ** 2).sum())
    assert not any("base" in each.text for each in found.remedies)


class Pose(nn.Module):
    """The logarithm of a quaternion, which is that of no rotation."""

    def __init__(self):
        super().__init__()
        self.rotation = nn.Parameter(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))

    def forward(self, target):
        whole = self.rotation / self.rotation.norm(dim=-1, keepdim=True)
        cosine, sines = whole[..., :1], whole[..., 1:]
        size = sines.norm(dim=-1, keepdim=True).clamp(min=1e-8)
        angle = torch.acos(cosine.clamp(-1, 1))
        return (sines * angle / size - target).square().sum()


def test_an_angle_of_0_keeps_its_gradient(as_kept):
    found = stopped(Pose(), lambda m, x: m(x), [torch.full((1, 3), 0.1)])
    first = found.remedies[0]
    assert first.is_recommended and not first.is_flat
    as_kept(first.text, first.code)


@pytest.mark.parametrize(("what", "least"), [("loss", 0.05), ("gradients", 0.4)])
def test_gradients_far_off_are_refused_as_a_loss_is(what, least):
    near = Remedy("", is_finite=True, loss=1.0, true_loss=1.0, misses=what, error=least)
    far = replace(near, error=2.81)
    assert near.worth == Worth.HELPS and far.worth == Worth.FAR
    assert f"281% off the true {'ones' if what == 'gradients' else '1'}" in far.harm


class Mish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        omega = 4 * (x + 1) + 4 * torch.exp(2 * x) + torch.exp(3 * x)
        omega = omega + torch.exp(x) * (4 * x + 6)
        delta = 2 * torch.exp(x) + torch.exp(2 * x) + 2
        return grad * torch.exp(x) * omega / delta**2


def test_the_code_of_a_backward_is_computed_in_float64_where_it_overflows(as_kept):
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1.0)
    x = torch.tensor([[1.0, 2.0], [16.0, 17.0]])
    found = stopped(model, lambda m, x: Mish.apply(m(x)).mean(), [x])
    first = found.remedies[0]
    assert first.is_right and first.true_loss is not None
    as_kept(first.text, first.code)


def test_a_divisor_of_0_becomes_one_that_is_small_beside_the_others(as_kept):
    model, y = nn.Linear(1, 3), torch.tensor([[2.0, 0.0, 4.0]])
    batches = [torch.ones(4, 1)] * 2

    def relative(model, x):
        of = y if relative.is_bad else y + 1
        relative.is_bad = True
        return ((model(x) - y).abs() / of).mean()

    relative.is_bad = False
    first = stopped(model, relative, batches).remedies[0]
    assert first.is_right
    as_kept(first.text)


def test_what_divides_0_by_0_is_not_chosen_by_size(as_kept):
    model, y = nn.Linear(1, 3), torch.tensor([[2.0, 0.0, 4.0]])
    found = explain(model, torch.ones(4, 1), lambda x: (model(x) * y / y).mean())
    as_kept(found.remedies[0].text)


def test_what_is_far_below_0_is_clamped_and_nothing_is_added(as_kept):
    model = Holder()
    found = explain(
        model, torch.full((3, 2), -1e-9), lambda x: (x * model.w).sqrt().sum()
    )
    assert not any(each.text.startswith("add") for each in found.remedies)
    as_kept(found.remedies[0].text)


@pytest.mark.parametrize(
    ("lines", "x", "place"),
    [
        # The number of what is left of a ratio's parts, whose own divisors are not 0.
        (
            "    rank = torch.arange(2.0, 4.0)\n"
            "    gain = (x * w / rank.log2()).sum(1)\n"
            "    best = (x / rank.log2()).sum(1)\n    return (gain / best).mean()\n",
            *([[1.0, 2.0], [0.0, 0.0]], 6),
        ),
        # Both are sums to which a number is added, which is 0 in one.
        (
            "    a = x * w\n    b = a / (a + a + 0)\n    c = a / (a + a + 1e-6)\n"
            "    return (b + c).mean()\n",
            *([[1.0, 2.0], [0.0, 3.0]], 4),
        ),
    ],
    ids=["divides by something else", "keeps its divisor from 0"],
)
def test_a_call_is_no_twin_that(tmp_path, lines, x, place):
    module, _ = module_of(tmp_path, f"import torch\ndef loss_of(x, w):\n{lines}")
    first = explained(module.loss_of, torch.tensor(x)).remedies[0]
    assert first.line == first.last_line == place and first.code.count("where") == 1


def test_a_median_of_zeros_is_no_sum():
    model = Holder()

    def kernel(x):
        squares = (x * model.w - x * model.w).square().sum(1)
        return (squares / squares.median()).mean()

    found = explain(model, torch.ones(4, 2), kernel)
    assert found.cause == "undefined" and "sum" not in str(found).splitlines()[0]


X4, Y4 = torch.tensor([[1.0], [2.0], [5e3], [3.0]]), torch.ones(4, 1)
BATCHES = {
    "a tensor": X4,
    "a tuple": (X4, Y4),
    "a list": [X4, Y4],
    "a dict": {"x": X4, "y": Y4},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("is_bad", [False, True], ids=["larger", "nan"])
def test_code_that_leaves_samples_out_of_a_batch_can_be_pasted(batch, is_bad):
    model = nn.Linear(1, 1)

    def parts_of(batch):
        of = list(batch.values()) if isinstance(batch, dict) else batch
        return of if isinstance(of, (tuple, list)) else (of, Y4[: len(of)])

    def loss_of(batch):
        x, y = parts_of(batch)
        return (x.exp() * model.weight - y).square().mean()

    if is_bad:
        batch = copy.deepcopy(batch)
        parts_of(batch)[0][2] = torch.nan
    found = explain(model, batch, loss_of)
    words = "drop the 1 of 4" if is_bad else "leave out samples whose"
    (remedy,) = (e for e in found.remedies if e.text.startswith(words))
    space = {"torch": torch, "batch": batch}
    exec(remedy.code, space)
    assert loss_of(space["batch"]).item() == pytest.approx(remedy.loss)
    assert type(space["batch"]) is type(batch) and len(parts_of(space["batch"])[0]) == 3


def test_each_micro_batch_is_left_without_its_own_bad_samples():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer), pytest.raises(NonFiniteError) as raised:
        for bad in (1, 3):
            x = torch.ones(4, 1)
            x[bad] = torch.nan
            model(x).mean().backward()
        optimizer.step()
    (remedy,) = raised.value.report.explanation.remedies
    assert remedy.text.startswith("drop the 1 of 4") and remedy.is_finite


def test_what_no_line_leaves_out_is_told_in_words():
    model = nn.Linear(1, 1)
    found = explain(
        model, [{"x": X4}], lambda b: (b[0]["x"].exp() * model.weight).mean()
    )
    words = [e for e in found.remedies if e.text.startswith("leave out samples")]
    assert words and words[0].is_finite and words[0].code == ""


@pytest.mark.slow
def test_an_underflow_over_many_operations_is_seen_in_the_whole_step(monkeypatch):
    monkeypatch.setattr("overflow_fast.explainer.tape._MOST_CALLS", 96)
    model = Holder()

    def likelihood(x):
        product = model.w.sum() / 6
        for _ in range(400):
            product = product * 0.5
        return -(product * x.mean()).log()

    found = explain(model, torch.ones(3, 2), likelihood)
    told = [each for each in found.evidence if each.startswith("the whole step in")]
    assert found.cause == "rounding" and len(told) == 1
    assert "none in float64" in str(found).splitlines()[0]
    true = 400 * math.log(2) - (model.w.sum() / 6).log().item()
    assert told[0].endswith(f"its loss is {true:.4g}")
    assert not any("wider dtype" in each for each in found.evidence)


@pytest.mark.parametrize(
    ("made_by", "cause"), [("mul", "rounding"), ("sub", "undefined")]
)
def test_a_0_that_a_difference_may_have_made_is_not_said_to_be_lost(made_by, cause):
    """Float64 tells 0.1 + 0.2 and 0.3 apart, by rounding of its own."""
    op = Op("aten.log", operands=[0.0])
    found = Explanation("forward", "undefined", op=op, evidence=["1 -inf of 1"])
    calls = [TorchCall(made_by, None, (), {}, ())]
    note_rounding(Failure(found, None, 0, calls=calls), 37.0)
    assert found.cause == cause
    assert found.evidence[-1] == "the whole step in float64 is finite: its loss is 37"


def test_what_float64_makes_of_an_operation_is_told_once_and_hides_nothing_else():
    inputs = [TensorSummary((), dtype="float32", numel=1)]
    op = Op("aten.div", inputs=inputs, outputs=inputs, true_value=0.5, limit=3e38)
    other = "`x` holds -9999 at [1, 0]"
    found = Explanation("forward", EMPTY_REDUCTION.name, op=op, evidence=["1 nan"])
    found.evidence += [other, in_float64_text(op, " at [0] alone")]
    tell_float64(found)
    assert len(found.evidence) == 3
    note_rounding(Failure(found, None, 0), 37.0)
    assert [*found.evidence[::2], len(found.evidence)] == ["1 nan", other, 3]
    assert found.evidence[1].endswith("rounded away in float32")
    tell_float64(found)
    assert found.evidence[3:] == [in_float64_text(op)]


def test_an_operation_without_a_result_has_none_in_float64():
    found = Explanation("backward", op=Op("c10d.allreduce_"), evidence=["of ranks"])
    tell_float64(found)
    assert found.evidence == ["of ranks"]


@pytest.mark.parametrize("num", [3, 12])
def test_the_forward_of_several_in_a_step_is_named(num, as_kept):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, explain=True)
    for place in range(num):
        x = torch.full((4, 2), float(place != num - 2))
        guard.run(lambda x=x: (model(x) / x).mean()).backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    assert error.value.report.explanation.forward == (num - 1, num)
    as_kept(error.value.report.explanation.evidence)
    guard.remove()


class Logarithm(nn.Module):
    def forward(self, x):
        return -x.relu().log()


@pytest.mark.tries_remedies
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_module_gives_in_one_of_several_forwards_is_found(place):
    """It is left out of the loss, which is finite."""
    model = nn.Sequential(nn.Linear(2, 2), Logarithm())
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(x):
        y = model(x)
        return torch.where(y < 9, y, 0).detach().mean() + model[0](x).mean()

    with OverflowGuard(model, optimizer, explain=True) as guard:
        for i in range(3):
            x = torch.full((2, 2), i + 1.0)
            x[1] -= 9.0 * (i == place)
            guard.run(lambda x=x: loss_of(x)).backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    found = error.value.report.explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert found.forward == (place + 1, 3)
    assert "leave values out" in found.remedies[0].text
    assert found.remedies[0].is_right


@pytest.mark.tries_remedies
def test_a_loss_of_several_forwards_stays_to_the_bit_in_those_up_to_the_bad_one():
    model = Holder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer, explain=True) as guard:
        for i in range(3):
            x = torch.full((2, 2), (i + 2.0) * (i != 1))
            guard.run(
                lambda x=x: (x * model.w).log().nan_to_num(neginf=0).mean()
            ).backward()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
    first = error.value.report.explanation.remedies[0]
    assert "leave values out" in first.text and first.is_recommended


def test_of_functions_of_several_forwards_none_is_named():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, explain=True)
    for scale in (1.0, 0.0):
        x = torch.full((4, 2), scale)
        guard.run(lambda x=x: ((model(x) + model(x)) / x).mean()).backward()
    with pytest.raises(NonFiniteError) as error:
        optimizer.step()
    assert error.value.report.explanation.forward is None
    guard.remove()


def test_an_exception_spends_no_line_on_what_is_far_off_beside_what_is_right():
    found = of_a_sure_class()
    assert any(each.worth == Worth.FAR for each in found.remedies)
    short = [row for _, rows in found.words.needed_remedies() for row in rows]
    assert short[0].startswith("tried")
    assert not any(row.startswith("did not help") for row in short)
    assert any(row.startswith("did not help") for row in found.words.rows())


def test_a_difference_that_is_small_beside_usual_losses_is_not_far_off():
    model, x = Holder(), torch.full((3, 2), 0.1)
    with torch.no_grad():
        model.w.fill_(0.3)
        target = x * model.w  # which float64 rounds otherwise
    found = explain(
        model, x, lambda x: ((x * model.w - target) ** 2).sum(1).sqrt().mean()
    )
    near = [e for e in found.remedies if e.loss and e.loss > 1000 * e.true_loss > 0]
    assert near and near[0].is_recommended


def test_half_inputs_of_a_model_without_weights_are_what_is_cast():
    x = torch.full((3, 8), 5e4).half()
    best = explain(nn.PairwiseDistance(), (x, -x)).remedies[0]
    assert best.is_recommended and "autocast" not in best.code
    assert best.code.count(".to(torch.bfloat16)") == 2


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def test_what_a_finite_step_leaves_out_is_not_said_to_be_finite_in_float64():
    model = nn.Sequential(Log(), nn.Hardtanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.zeros(3, 4)  # no output that is finite in part, as a mask is
    with OverflowGuard(model, optimizer, "warn") as guard:
        guard.run(lambda: model(x).mean()).backward()
        optimizer.step()
    found = guard.last_report.explanation
    assert (found.cause, found.op.name) == ("undefined", "aten.log")
    assert not any("finite: its loss" in each for each in found.evidence)


class Layer(nn.Module):
    def __init__(self, size=1):
        super().__init__()
        self.rate = nn.Linear(2, size)
        nn.init.constant_(self.rate.weight, -1.0)

    def forward(self, x):
        return self.rate(x).squeeze(-1)


LINKED = {
    "moved": lambda m, x: m(x).log().sum(),
    "divided": lambda m, x: (m(x) / 2).sqrt().sum(),
    "a rate": lambda m, x: nn.functional.poisson_nll_loss(
        m.rate(x), torch.ones(3, 1), log_input=False
    ),
}


@pytest.mark.parametrize("name", LINKED)
def test_what_a_layer_returns_is_made_positive_where_that_is_needed(name, as_kept):
    torch.manual_seed(0)
    model = Layer()
    as_kept(stopped(model, LINKED[name], [torch.ones(3, 2)]).remedies[0].code)


def test_a_layers_result_that_others_read_is_made_positive_where_it_is_made(as_kept):
    torch.manual_seed(0)

    def loss(model, x):
        scale = model.rate(x)
        return (scale.log() + 1 / scale).sum()

    as_kept(stopped(Layer(), loss, [torch.ones(3, 2)]).remedies[0].code)


def test_a_batch_is_kept_from_the_0_that_a_package_meets():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 3), torch.rand(4, 3) / 2 + 0.2
    x[2, 0] = 0

    def loss_of(x):
        rates = torch.distributions.Gamma(model(x).exp() + 1, 1.0, validate_args=False)
        return rates.log_prob(x).sum()

    found = explain(model, x, loss_of)
    assert found.remedies[0].code == "batch = batch.clamp(min=0.1)"


class Uncertainty(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, -0.025]))

    def forward(self, x):
        total = 0
        for i in range(2):
            w = self.weight[i]
            total = total + 0.5 * x[:, i] / w**2 + torch.log(w)
        return total.mean()


def test_a_weight_is_made_positive_as_what_a_layer_returns_is(as_kept):
    found = stopped(Uncertainty(), lambda m, x: m(x), [torch.ones(3, 2)])
    as_kept(found.remedies[0].code)


BEYOND = {
    "log of a difference": lambda y: (y.square() - 3).log(),
    "rsqrt of a difference": lambda y: (y - 3).rsqrt(),
    "atanh of a product": lambda y: (1.5 * y).atanh(),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_clamp_hides_what_is_plainly_outside_of_a_domain(name, as_kept):
    model = Holder()
    found = explain(model, torch.ones(3, 2), lambda x: BEYOND[name](x * model.w).sum())
    assert not any("clamp" in each.text for each in found.remedies)
    as_kept(str(found).splitlines()[0])


WITHIN = {
    "what is rounded": lambda y: (1 - y.square() * (1 + 1e-6)).log().sum(),
    "a root at its end": lambda y: (y - 3).sqrt().sum(),
    "what is drawn": lambda y: (y * torch.normal(-1.0, 0.1, (3, 2))).log().sum(),
}


@pytest.mark.parametrize("name", WITHIN)
def test_a_clamp_mends_what_is_rounded_or_drawn_and_continues_a_root(name):
    model = Holder()
    found = explain(model, torch.ones(3, 2), lambda x: WITHIN[name](x * model.w))
    assert any("clamp" in each.text and each.is_recommended for each in found.remedies)
    assert "hide" not in str(found)


def test_a_difference_below_zero_is_no_raw_output_of_a_layer():
    model = Layer()
    found = stopped(model, lambda m, x: (m(x) - 3).log().sum(), [torch.ones(3, 2)])
    assert not {rule.text for rule in LINKS} & {each.text for each in found.remedies}


@pytest.mark.slow
def test_infs_of_a_logarithm_in_the_batch_are_clamped_to_its_least_number(as_kept):
    spectrum = torch.tensor([[0.5, 0.0], [0.25, 0.125]]).log()
    found = stopped(nn.Linear(2, 1), lambda m, x: m(x).square().mean(), [spectrum])
    first, other = found.remedies[:2]
    as_kept(first.code)
    assert first.is_right and other.is_right
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    hole = torch.tensor([[-math.inf, 1.0], [math.nan, 2.0]])
    for batch in (mask, hole):
        found = stopped(nn.Linear(2, 1), lambda m, x: m(x).square().mean(), [batch])
        assert all(each.text != first.text for each in found.remedies)
        assert len(found.remedies) <= 1


def test_a_power_of_two_tensors_has_a_guarded_base(as_kept):
    model, x = Holder(), torch.tensor([0.0, 1.0])
    found = explain(model, x, lambda x: ((x * model.w) ** (model.w / 2)).sum())
    as_kept(found.remedies[0].text)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_output_of_one_infinity_is_explained_without_its_loss(sign):
    """-inf alone may be a mask; the gradients that come of it are no reason."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[1].weight, sign * 3e38)
    batches = iter([torch.ones(3, 2)])  # nobody offered to take another one
    with OverflowGuard(model, optimizer), pytest.raises(NonFiniteError) as caught:
        model(next(batches)).pow(2).mean().backward()
        optimizer.step()
    found = caught.value.report.explanation
    assert (found.phase, found.module, found.op.name) == ("forward", "1", "aten.addmm")
    assert found.is_overflow


class Flow(Assembled):
    """A flow that returns what it made of a sample, and its log-determinant."""

    def forward(self, x):
        return x * torch.exp(self.scale * 50), self.scale.sum()


def test_a_replay_takes_no_other_scalar_for_the_loss():
    model = Flow(scale=nn.Parameter(torch.zeros(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "warn")
    with guard:
        for _ in range(2):
            z, log_det = model(torch.ones(4, 2) * 1e-3)
            loss = z.pow(2).sum(1).mean() - log_det
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.scale.fill_(2.0)
    report = guard.last_report
    assert report.step == 1 and report.explanation.op.name == "aten.exp"
    tried = [each for each in report.explanation.remedies if each.loss is not None]
    assert max(each.loss for each in tried) > 1e6  # its scalar is 4


@pytest.mark.parametrize(
    "drawn",
    [
        lambda x: torch.rand(x.shape, dtype=x.dtype),
        lambda x: torch.distributions.Uniform(x - x, x - x + 1).sample(),
        lambda x: torch.rand(x.shape, dtype=torch.complex(x, x).dtype).real,
        lambda x: torch.rand_like(x),
        lambda x: x.new_empty(x.shape).uniform_(),
    ],
)
def test_the_step_in_float64_draws_the_numbers_of_the_step(drawn):
    model, x = nn.Linear(2, 3), torch.ones(3, 2)
    far = torch.tensor([0.0, 0.0, 300.0])  # its exp is 0 in float32

    def loss_of(x):
        return model(drawn(x)).square().mean() - (model(x) - far).softmax(1).log().sum()

    first = explain(model, x, loss_of).remedies[0]
    assert first.is_right and first.true_loss == pytest.approx(first.loss, rel=1e-6)


def test_a_sum_of_scores_that_is_0_is_at_least_1(as_kept):
    model, scores = nn.Linear(2, 1), [torch.rand(4) for _ in range(3)]
    scores.append(torch.zeros(4))  # nothing in the last batch

    def loss_of(model, x):
        own = scores.pop(0) if len(scores) > 1 else scores[0]
        return F.softplus(model(x)).sum() / own.sum()

    first = stopped(model, loss_of, [torch.ones(4, 2)] * 4).remedies[0]
    as_kept(first.text, first.code)


def loss_of_flow(model, x):
    first, second = x.chunk(2, 1)
    for layer in model:
        first, second = second * torch.exp(layer(first)), first
    return (first.square() + second.square()).mean()


def test_several_exp_in_a_row_are_clamped_until_their_product_is_of_use():
    """Where float64 overflows as well: no loss is the true one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    for layer in model:
        layer.weight.data.mul_(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    batches = [torch.randn(64, 6).clamp(-2, 2) for _ in range(4)]
    batches[3][5] *= 100
    first, *others = stopped(model, loss_of_flow, batches, optimizer).remedies
    assert first.text == "clamp the argument of exp to 2" and first.is_right
    assert first.elsewhere.change == 0.0
    refused = [each for each in others if "argument of exp" in each.text]
    assert len(refused) == 2 and not any(each.is_recommended for each in refused)


WEIGHTS = """
import torch
import torch.nn.functional as F

def loss_of(x, w):
    y = (x > 0).long()
    counts = torch.bincount(y, minlength=2)
    weights = torch.zeros(2)
    weights[:] = (len(x) - counts) / (counts + 1e-8)
    weights /= weights.min()
    return F.cross_entropy(x[:, None] * w, y, weight=weights)
"""


def test_what_is_divided_by_its_own_minimum_of_0_keeps_its_gradient(tmp_path):
    module, path = module_of(tmp_path, WEIGHTS)
    x = torch.tensor([0.5, 1.0, 2.0])  # of one class, whose weight is 0
    first = explained(module.loss_of, x).remedies[0]
    assert first.is_right and not first.is_flat and not first.parts
    cured = F.cross_entropy(x[:, None] * Holder().w, (x > 0).long())
    assert first.loss == cured.item()
    fixed, _ = module_of(tmp_path, edited(path, first))
    assert fixed.loss_of(x, Holder().w) == cured
