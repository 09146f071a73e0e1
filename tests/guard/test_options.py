"""The options of a guard: one definition for signature, checks, help and commands."""

import copy
import dataclasses
import inspect
import pickle
import pydoc

import pytest
from torch import nn

import overflow_fast
from overflow_fast import OverflowGuard
from overflow_fast.guard.config import GuardConfig
from overflow_fast.guard.options import options_of
from overflow_fast.monitors import (
    MONITORS,
    Headroom,
    LayerAudit,
    MaskedOps,
    Replicas,
    Saturation,
    Spikes,
    Underflow,
)
from overflow_fast.options import Evidence, Explain, Log, Record, Schedule

pytestmark = pytest.mark.day  # a contract: all of its cases

PARAMETERS = inspect.signature(OverflowGuard).parameters
FIELDS = dataclasses.fields(GuardConfig)
NESTED = (Explain, Evidence, Log, Record, Schedule, *MONITORS)


def config_of(**given):
    defaults = {each.name: PARAMETERS[each.name].default for each in FIELDS}
    return GuardConfig.of(defaults | given)


# One definition.


def test_the_signature_is_that_of_the_definition():
    others = ["model", "optimizer", "_defer"]
    names = [name for name in PARAMETERS if name not in others]
    assert names == [each.name for each in FIELDS]
    assert len(names) + 2 == 17
    assert config_of() == GuardConfig()


@pytest.mark.parametrize("options", [GuardConfig, *NESTED])
def test_every_field_is_defined_once(options):
    assert [name for name, _ in options_of(options)] == [
        each.name for each in dataclasses.fields(options)
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", *(f.name for f in FIELDS)])
def test_the_docstring_lists_every_argument(name):
    text = inspect.getdoc(OverflowGuard)
    arguments, _, rest = text.partition("Args:\n")[2].partition("Raises:\n")
    assert f"\n    {name}: " in f"\n{arguments}" and "Example:" in rest


@pytest.mark.parametrize("options", NESTED)
def test_options_are_public_and_documented(options):
    public = vars(overflow_fast.options) | vars(overflow_fast.monitors)
    assert public[options.__name__] is options
    fields = inspect.getdoc(options).partition("Attributes:\n")[2]
    for each in dataclasses.fields(options):
        assert f"    {each.name}: " in fields


def test_help_fits_two_screens():
    text = pydoc.plain(pydoc.render_doc(OverflowGuard))
    own = text.partition(" |  Methods defined here:")[0]
    lines = [row for line in own.splitlines() for row in range(0, len(line) or 1, 100)]
    assert len(lines) <= 100


# Shorter forms.


@pytest.mark.parametrize(
    "name, given, stands_for",
    [
        ("explain", True, Explain("always")),
        ("explain", False, Explain("never")),
        ("explain", "auto", Explain()),
        ("evidence", "folder", Evidence("folder")),
        ("log", "run.jsonl", Log("run.jsonl")),
        ("record", "run.ofr", Record("run.ofr")),
        ("schedule", 10, Schedule(every=10)),
    ],
)
def test_a_plain_value_stands_for_the_default_object(name, given, stands_for):
    assert getattr(config_of(**{name: given}), name) == stands_for
    assert getattr(config_of(**{name: stands_for}), name) == stands_for


def test_a_path_may_be_an_object(tmp_path):
    assert config_of(log=tmp_path / "log.jsonl").log.path == tmp_path / "log.jsonl"


@pytest.mark.explains
def test_iterators_are_read_once():
    config = config_of(include=iter(["0"]), monitors=iter([Spikes()]))
    assert config.include == ("0",) and config.monitors == (Spikes(),)


def test_monitors_replace_the_default():
    assert {type(each) for each in config_of().monitors} == {Spikes, Saturation}
    config = config_of(monitors=[Headroom(bits=2.0)])
    assert config.monitor(Headroom).bits == 2.0
    assert config.monitor(Spikes) is None


@pytest.mark.parametrize("options", NESTED)
def test_options_are_values(options):
    path = ("file",) if options in (Evidence, Log, Record) else ()
    made = options(*path)
    assert made == options(*path) and hash(made) == hash(options(*path))
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    first = dataclasses.fields(options)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, first, None)


# Errors name the argument as it is written.


@pytest.mark.explains
def test_a_wrong_value_of_a_field_is_named(as_kept):
    as_kept.errors(
        lambda make: make(),
        [
            lambda: Explain("sometimes"),
            lambda: Explain(budget=0),
            lambda: Explain(frames=-1),
            lambda: Evidence("e", mib=0),
            lambda: Evidence("e", keep=0),
            lambda: Log("l", ranks="0"),
            lambda: Record("r", mib=-1),
            lambda: Record("r", steps=0),
            lambda: Record("r", ranks=0),
            lambda: Schedule(0),
            lambda: Schedule(warmup=-1),
            lambda: Spikes("raise"),
            lambda: Spikes(None),
            lambda: Saturation(1.5),
            lambda: Headroom(0),
            lambda: Underflow(0),
            lambda: MaskedOps(0),
            lambda: LayerAudit(0),
        ],
    )


@pytest.mark.explains
def test_a_wrong_type_of_a_field_is_named(as_kept):
    as_kept.errors(
        lambda make: make(),
        [
            lambda: Explain(budget=None),
            lambda: Explain(replay_safe=1),
            lambda: Evidence(None),
            lambda: Log("l", mib=True),
            lambda: Log("l", keep=None),
            lambda: Schedule(2.0),
            lambda: Headroom("2"),
            lambda: Underflow(1.0),
            lambda: Replicas("1"),
        ],
    )


def test_a_wrong_value_of_an_argument_is_named(as_kept):
    def call(arguments):
        OverflowGuard(nn.Linear(1, 1), **arguments)

    as_kept.errors(
        call,
        [
            {"schedule": 0},
            {"monitors": [Headroom(), Spikes(), Headroom(bits=2.0)]},
            {"monitors": [Spikes("skip")], "sync": "lagged"},
        ],
    )


@pytest.mark.explains
def test_a_wrong_type_of_an_argument_is_named(as_kept):
    def call(arguments):
        OverflowGuard(nn.Linear(1, 1), **arguments)

    as_kept.errors(
        call,
        [
            {"explain": "always"},
            {"explain": None},
            {"explain": 1},
            {"log": True},
            {"evidence": 3},
            {"record": Log("l")},
            {"schedule": None},
            {"schedule": True},
            {"monitors": None},
            {"monitors": Spikes()},
            {"monitors": "spikes"},
            {"monitors": [Spikes]},
            {"monitors": ["spikes"]},
            {"monitors": [Log("l")]},
        ],
    )
