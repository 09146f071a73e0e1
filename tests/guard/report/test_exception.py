"""The exception: where it is raised, and what its text ends with."""

import functools
import pickle
import traceback
from pathlib import Path

import pytest
import torch
from assembled import Assembled
from torch import nn

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard, assert_finite_state
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.op import Op, TensorSummary
from overflow_fast.guard.report.remedy import Remedy
from overflow_fast.guard.report.report import Report
from overflow_fast.guard.verdict.verdict import BadEntry, Origin, Verdict

PACKAGE = str(Path(overflow_fast.__file__).parent)
NAN = float("nan")


class Doubled(torch.optim.SGD):
    """Has a step of its own around torch's."""

    def step(self, closure=None):
        return super().step(closure)


class Parted(Assembled):
    def forward(self, x):
        return self.layer(x).sub(10).log()


def backward(model, optimizer):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    return loss


def plain_step(guard, model, optimizer):
    backward(model, optimizer)
    optimizer.step()


def step_with_closure(guard, model, optimizer):
    optimizer.step(functools.partial(backward, model, optimizer))


def step_under_schedule(guard, model, optimizer):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    plain_step(guard, model, optimizer)
    schedule.step()


def step_of_a_scaler(guard, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)


def check(guard, model, optimizer):
    backward(model, optimizer)
    guard.check()


def evaluation(guard, model, optimizer):
    with torch.no_grad():
        model(torch.ones(2, 4))


def evaluation_in_run(guard, model, optimizer):
    with torch.no_grad():
        guard.run(lambda: model(torch.ones(2, 4)))


def state_of_the_guard(guard, model, optimizer):
    model.layer.weight.data.fill_(NAN)
    guard.assert_finite_state()


def state(guard, model, optimizer):
    model.layer.weight.data.fill_(NAN)
    assert_finite_state(model)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, Doubled])
@pytest.mark.parametrize(
    "act",
    [
        *(plain_step, step_with_closure, step_under_schedule),
        *(step_of_a_scaler, check, evaluation, evaluation_in_run),
        *(state_of_the_guard, state),
    ],
)
def test_a_traceback_has_one_frame_of_the_package(act, make):
    model = Parted(layer=nn.Linear(4, 4))
    optimizer = make(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        with pytest.raises(NonFiniteError) as raised:
            act(guard, model, optimizer)
    files = [each.filename for each in traceback.extract_tb(raised.value.__traceback__)]
    assert len([file for file in files if file.startswith(PACKAGE)]) == 1, files
    assert files.count(__file__) >= 2  # this test and `act`


def test_frames_of_the_program_between_those_of_the_package_stay():
    model = Parted(layer=nn.Linear(4, 4))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer):
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step(functools.partial(backward, model, optimizer))
    text = "".join(traceback.format_exception(raised.value))
    assert "optimizer.step(functools" in text
    assert (
        "During handling" not in text and "overflow_fast.NonFiniteError: Step" in text
    )


def test_a_pickled_error_has_its_report():
    error = NonFiniteError(explained([FAILED, HELPED]))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is NonFiniteError and again.report.step == 3
    assert str(again) == str(error)


def bad_entry():
    return BadEntry(
        "output", "1", "Linear", "output", dtype="float16", numel=32, num_inf=8
    )


FAILED = Remedy("1 in float32", 'overflow_fast.keep_in_fp32(model, ["1"])')
HELPED = Remedy("bfloat16", "model.to(torch.bfloat16)", is_finite=True, loss=1.5)


def explained(remedies, **named):
    op = Op("aten.mul.Tensor", "/a/train.py", 13, "y = x * x")
    found = Explanation("forward", "undefined", "1", op, remedies=remedies, **named)
    verdict = Verdict(first=bad_entry(), origin=Origin("made", maker="1"))
    return Report(3, "raise", verdict, explanation=found)


@pytest.mark.parametrize("num_notes", [0, 2, 9])
@pytest.mark.explains
def test_the_text_ends_with_the_remedy(num_notes, as_kept):
    words = [f"note {each}" for each in range(num_notes)]
    report = explained([FAILED, HELPED], notes=words, evidence=words, chain=words)
    report.frames, report.moment = ["        1 Linear"], "before"
    text = str(NonFiniteError(report))
    lines = text.splitlines()
    assert lines[0].startswith("Step 3: ")
    as_kept(lines[0])
    as_kept(lines[1:])
    assert len(lines) <= 7
    assert str(report).startswith("Detected inf/nan") and "Linear\n" in str(report)
    assert str(report).endswith("\n".join(lines[-2:])) and repr(report) == str(report)


@pytest.mark.parametrize("num_lines", [1, 2, 3])
@pytest.mark.explains
def test_what_is_new_is_in_the_text_rather_than_the_line_that_failed(num_lines):
    code = "\n".join(["x = x.double()"] * num_lines)
    remedy = Remedy("float64", code, is_finite=True, loss=1.5)
    lines = str(NonFiniteError(explained([remedy], news="`x` is up to 400"))).split(
        "\n"
    )
    assert any(each.startswith("new ") for each in lines) and len(lines) <= 7
    assert sum("x.double()" in each for each in lines) == num_lines
    assert any(each.startswith("code ") for each in lines) == (num_lines < 3)


@pytest.mark.explains
def test_one_cause_has_one_name():
    op = Op("aten.mul.Tensor", outputs=[])
    for outputs in (
        [],
        [TensorSummary((2,), 0.0, 1.0, dtype="float16", numel=2, num_inf=1)],
    ):
        op.outputs = outputs
        found = Explanation("forward", "range overflow", "1", op)
        assert f"\ncause     {found.cause}" in str(found)
