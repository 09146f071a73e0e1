"""Advice is given where it is known to help, and nowhere else."""

from unittest import mock

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, batches, make, plant, train_step, warned
from torch import nn

from overflow_fast import Explanation, OverflowGuard
from overflow_fast.guard.report.advice import answers


def advice_of(report):
    """The lines of a report that say what to try."""
    return [text for text in report.sentences() if "What to try" in text]


def of_weight(step):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for i, batch in enumerate(batches(step + 1)):
            if i == step:
                model.head.weight.data[0, 0] = NAN
            train_step(model, optimizer, batch)
    return guard.last_report


def test_weights_that_were_bad_from_the_start_are_not_for_a_checkpoint(as_kept):
    (text,) = advice_of(of_weight(0))
    as_kept(text)
    (text,) = advice_of(of_weight(1))
    as_kept(text)


@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_all_weights_that_were_bad_from_the_start_are_to_be_initialized(kind, as_kept):
    """Of biases there is a line to paste: what a matrix is to be is not known."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for layer in model:
        layer.get_parameter(kind).data.fill_(NAN)
    with OverflowGuard(model, optimizer, "warn", explain=True) as guard:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    as_kept(guard.last_report.headline(), *advice_of(guard.last_report))


def test_a_buffer_is_no_name_of_a_module(model, optimizer):
    model.eval()
    model.norm.running_mean[0] = INF
    report = warned(model, optimizer, batches(1)[0])
    assert report.verdict.origin.source == "buffer"
    assert advice_of(report) == []  # it may have been initialized, and written since


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.explains
def test_a_bad_batch(model, optimizer, value, as_kept):
    x, y = batches(1)[0]
    x[2, 3] = value
    report = warned(model, optimizer, (x, y))
    as_kept(report.verdict.origin.batch_places, report.explanation)
    assert advice_of(report) == []  # a replay without the sample has answered


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_bad_batch_of_float8(dtype, as_kept):
    """float8 has no `isfinite`: the sample is found all the same."""
    model = nn.Sequential(Widened(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(4, 4)
    x[2, 1] = NAN
    batch = x.to(dtype)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(batch).sum().backward()
        optimizer.step()
    as_kept(guard.last_report.verdict.origin.batch_places)


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


class Tower(Assembled):
    def forward(self, x, y):
        return ((self.batchnorm(x) * (NAN if self.is_batchnorm else 1)) - y).mean()


def test_a_module_with_batch_in_its_name_is_no_batch():
    model = Tower(batchnorm=nn.Linear(8, 8), is_batchnorm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=False) as guard:
        model(*batches(1)[0]).backward()
        optimizer.step()
    assert advice_of(guard.last_report) == []


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_not_known_is_not_advised(model, optimizer, value, backward):
    with plant(model.blocks[1].fc2, value, backward=backward):
        report = warned(model, optimizer, batches(1)[0])
    text = str(report)
    assert advice_of(report) == []
    for word in ("learning rate", "clip", "logarithm", "division", "checkpoint"):
        assert word not in text


def test_a_gradient_in_float16_says_nothing_of_scaling():
    model = nn.Sequential(nn.Linear(2, 2)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        (model(torch.ones(1, 2).half()).sum().float() * 1e9).backward()
        optimizer.step()
    assert guard.last_report.verdict.num_bad_frames
    assert advice_of(guard.last_report) == []


def test_a_buffer_that_a_skip_puts_back_needs_no_checkpoint(as_kept):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:
        for scale in (1.0, 1e30):
            model(torch.randn(8, 4) * scale).sum().backward()
            optimizer.step()
    assert guard.last_report.verdict.origin.source == "buffer"
    assert model[1].running_var.isfinite().all()
    (text,) = advice_of(guard.last_report)
    as_kept(text)


def test_a_learning_rate_is_made_finite_before_a_checkpoint_is_loaded(as_kept):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for i, batch in enumerate(batches(3)):
            optimizer.param_groups[0]["lr"] = NAN if i else 0.1
            train_step(model, optimizer, batch)
    (text,) = advice_of(guard.last_report)
    as_kept(text)


@pytest.mark.explains
@pytest.mark.parametrize("has_bad_gradient", [False, True])
def test_eps_is_not_blamed_for_gradients_that_were_let_through(has_bad_gradient):
    model = nn.Sequential(nn.Linear(2, 2)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    x = torch.zeros(1, 2).half()
    with OverflowGuard(model, optimizer, "warn") as guard:
        for step in range(2):
            optimizer.zero_grad()
            loss = model(x).float().sum()
            (loss * NAN if has_bad_gradient and step == 0 else loss).backward()
            optimizer.step()
    report = guard.last_report
    assert report.verdict.origin.source == "weight"
    assert ("eps=1e-08" in str(report)) == (not has_bad_gradient)


@pytest.mark.explains
def test_an_overflow_to_minus_inf_is_no_mask():
    first = mock.Mock(signs="-", num_inf=4, numel=4)
    overflow, other = Explanation(cause="range overflow"), Explanation()
    assert [answers(each, first) for each in (None, other, overflow)] == [0, 0, 1]
    in_part = mock.Mock(signs="-", num_inf=4, numel=5)  # no alarm by itself
    for each in (mock.Mock(signs="+-", num_inf=4, numel=4), in_part):
        assert not answers(overflow, each)


@pytest.mark.explains
def test_no_input_is_to_be_checked_that_is_the_alarm_where_a_note_says_more():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn") as guard:
        hidden = model(torch.ones(3, 4))
        model((hidden.detach().abs() * 1e3).exp()).mean().backward()
        optimizer.step()
    report = guard.last_report
    assert report.verdict.origin.batch_places == ["`input[0]`"]
    assert "guard.run" in report.explanation.notes[0]
    assert advice_of(report) == []
