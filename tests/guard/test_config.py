"""The configuration: one list of arguments for the constructor, checks and docs."""

import dataclasses
import inspect

import pytest

from overflow_fast import OverflowGuard
from overflow_fast.guard.config import GuardConfig

ARGUMENTS = inspect.signature(OverflowGuard).parameters
FIELDS = [field.name for field in dataclasses.fields(GuardConfig)]


def test_the_constructor_takes_every_field_and_nothing_else():
    others = ["model", "optimizer", "_defer"]
    assert [name for name in ARGUMENTS if name not in others] == FIELDS


@pytest.mark.parametrize("name", ["model", "optimizer", *FIELDS])
def test_the_docstring_lists_every_argument(name):
    text = inspect.getdoc(OverflowGuard)
    arguments, _, rest = text.partition("Args:\n")[2].partition("Raises:\n")
    assert f"\n    {name}: " in f"\n{arguments}" and "Example:" in rest


def test_a_configuration_cannot_change():
    given = {name: ARGUMENTS[name].default for name in FIELDS}
    config = GuardConfig.of(given | {"include": iter(["0"])})
    assert config.include == ("0",) and config.allow == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.every = 2
