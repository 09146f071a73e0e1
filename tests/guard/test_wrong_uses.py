"""Wrong uses are answered with the argument, what was wanted, what came, what to do."""

import functools

import pytest
from guarding import batches, make
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard, assert_finite_state

MODEL, OPTIMIZER = make()
WRONG = {
    "all": lambda: OverflowGuard(MODEL, OPTIMIZER, watch="all"),
    "another name": lambda: OverflowGuard(MODEL, OPTIMIZER, on_nan="skip"),
    "no such name": lambda: OverflowGuard(MODEL, OPTIMIZER, policy="skip"),
    "optimizer first": lambda: OverflowGuard(OPTIMIZER, MODEL),
    "a class": lambda: OverflowGuard(nn.Linear, OPTIMIZER),
    "an optimizer's class": lambda: OverflowGuard(MODEL, type(OPTIMIZER)),
    "parameters": lambda: OverflowGuard(MODEL.parameters()),
    "an optimizer's state": lambda: assert_finite_state(OPTIMIZER),
    "no submodule": lambda: OverflowGuard(nn.Linear(1, 1), include=["h.*"]),
    "no rule": lambda: OverflowGuard(nn.Linear(1, 1), allow={"h:output": "nan"}),
    "a rule": lambda: OverflowGuard(MODEL, allow={"h:output": "nan"}),
    "ids": lambda: OverflowGuard(MODEL).request(ids="abcd"),
    "one id": lambda: OverflowGuard(MODEL).request(ids=7),
}


@pytest.mark.day
@pytest.mark.parametrize("use", WRONG.values(), ids=WRONG)
def test_a_wrong_use_is_answered_with_the_right_one(use, as_kept):
    as_kept.error((TypeError, ValueError), use)


def test_a_whole_step_in_run_is_said_once(caplog, as_kept):
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)

    def step(x, y):
        model(x, y=y)["loss"].backward()
        optimizer.step()

    for batch in batches(3):
        guard.run(functools.partial(step, *batch))
    as_kept(caplog.messages)


def test_a_wrong_name_of_the_package_has_a_suggestion():
    with pytest.raises(AttributeError) as raised:
        overflow_fast.OverflowGaurd  # noqa: B018
    assert raised.value.name == "OverflowGaurd" and raised.value.obj is overflow_fast
