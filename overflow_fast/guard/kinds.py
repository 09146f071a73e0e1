"""The kinds of arguments: which values one takes, and how a command line spells it.

Each check raises TypeError or ValueError with a sentence that names the argument.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..base.tensors import check_number
from ..base.text import either, kind_of, nearest
from ..detector.selection import Wanted
from .policy import ACTIONS
from .process import has_process_group
from .verdict.rules import Rules

TRIPWIRE = "tripwire"
Path = str | os.PathLike[str]
Metrics = Mapping[str, float]
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
Exporter = Callable[[int, Metrics], object]


@dataclass(frozen=True)
class Kind:
    """The values that an argument takes.

    Attributes:
        check: Takes the argument's name and value; raises TypeError or ValueError with
            a sentence if it cannot be used.
        parse: Reads the value from a word of a command line; None if no word can give
            it.
        metavar: Stands for the value in a command's help.
        choices: The words that a command line takes, where these are all.
        note: Ends the help of an option, such as how several values are separated.
        options: The class of the objects that it takes.
    """

    check: Callable[[str, Any], None]
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    note: str = ""
    options: type[Any] | None = None


def whole(least: int) -> Kind:
    """Whole numbers from a least one on."""
    return Kind(lambda name, value: check_int(name, value, least), int, "N")


def one_of(*choices: str) -> Kind:
    """A few words."""
    listed = either(map(repr, choices))

    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise ValueError(f"{name} must be {listed}, got {value!r}")

    return Kind(check, str, choices=choices)


def reusable(value: Any) -> Any:
    """Returns an argument that can be read repeatedly: its iterators as tuples."""
    if isinstance(value, Mapping):
        return {key: reusable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [reusable(each) for each in value]
    if isinstance(value, (tuple, Iterator)) and not callable(value):
        return tuple(reusable(each) for each in value)
    return value


def check_int(name: str, value: Any, least: int) -> None:
    """Raises TypeError or ValueError if an argument is no int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_positive(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if an argument is no number above 0."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"{name} must be more than 0, got {value}")


def check_share(name: str, value: Any) -> None:
    """Raises TypeError or ValueError if an argument is no share."""
    check_positive(name, value)
    if value > 1:
        raise ValueError(f"{name} must be a share of at most 1, got {value}")


def check_bool(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def check_names(name: str, patterns: Any, optional: bool = False) -> None:
    """Raises TypeError if an argument is no list of patterns, or None if `optional`."""
    if patterns is None and optional:
        return
    is_list = isinstance(patterns, Collection) and not isinstance(
        patterns, (str, bytes, Mapping)
    )
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"{name} must be a list of patterns of module names, got {patterns!r}"
        )


def check_path(name: str, value: Any) -> None:
    """Raises TypeError if an argument is no path."""
    if not is_path(value):
        raise TypeError(f"{name} must be a path, got {type(value).__name__}")


def is_path(value: Any) -> bool:
    """True for the name of a file."""
    return isinstance(value, (str, os.PathLike))


def names_arguments(
    function: Callable[_Parameters, _Result], owner: str = ""
) -> Callable[_Parameters, _Result]:
    """Wraps a function so that a keyword it does not take is answered with one it does.

    Args:
        function: A class, or its method.
        owner: Who has the arguments, if it is not this class.

    Raises:
        TypeError: From the wrapped function, for such a keyword.
    """
    known = [n for n in inspect.signature(function).parameters if n.isidentifier()]
    names = [name for name in known if name != "self" and name[0] != "_"]
    owner = owner or function.__qualname__.partition(".")[0]

    @functools.wraps(function)
    def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                meant = nearest(name, names) or f": they are {', '.join(names)}"
                raise TypeError(f"{owner} has no argument {name}{meant}")
        return function(*args, **kwargs)

    return called


def check_watch(name: str, watch: Any) -> None:
    """Raises TypeError or ValueError if `watch` is no list of its names."""
    if isinstance(watch, str) and watch == TRIPWIRE:
        return
    known = ", ".join(map(repr, Wanted._fields))
    if isinstance(watch, str) or not isinstance(watch, Iterable):
        raise TypeError(
            f"{name} must be a list of names out of {known}, or be 'tripwire', got "
            f"{watch!r}"
        )
    for each in watch:
        if each not in Wanted._fields:
            wrong = f"{each!r}{nearest(str(each), [*Wanted._fields, TRIPWIRE])}"
            raise ValueError(
                f"{name} must hold names out of {known}, or be 'tripwire', got {wrong}"
            )
    if not list(watch):
        raise ValueError(f"{name} must hold at least one name, got none")
    if "grad_outputs" in watch and "activations" not in watch:
        raise ValueError(
            f"{name} must hold 'activations' where it holds 'grad_outputs'"
        )


def check_group(name: str, group: Any) -> None:
    """Raises TypeError or ValueError if `process_group` cannot be used."""
    if group is None or group is False:
        return
    if isinstance(group, (bool, int, str)):
        raise _wrong_group(name, group)
    if not has_process_group():
        raise ValueError(
            f"{name} was given, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() first"
        )
    if not isinstance(group, (dist.ProcessGroup, dist.device_mesh.DeviceMesh)):
        raise _wrong_group(name, group)


def _wrong_group(name: str, group: object) -> TypeError:
    return TypeError(
        f"{name} must be a ProcessGroup, a DeviceMesh, False or None, got "
        f"{type(group).__name__}"
    )


def check_policy(name: str, policy: Any) -> None:
    """Raises ValueError if a policy is neither an action nor a callable."""
    if not callable(policy) and policy not in ACTIONS:
        raise ValueError(
            f"{name} must be 'raise', 'warn', 'skip' or a callable that takes "
            f"a Report and returns one of these, got {policy!r}"
        )


def check_allow(name: str, allow: Any) -> None:
    """Raises TypeError or ValueError if no rules can be made of an argument."""
    Rules({} if allow is None else allow)


def exporters_of(metrics: Any) -> list[Exporter]:
    """The exporters in an argument that may be None, one, or several.

    Raises:
        TypeError: If one of them cannot be called.
    """
    is_one = callable(metrics) or not isinstance(metrics, Iterable)
    several = [metrics] if is_one else metrics
    several = [] if metrics is None else list(several)
    for each in several:
        if not callable(each) or isinstance(each, type):
            raise TypeError(
                "metrics must be a callable that takes the step and a dict of numbers, "
                f"a list of them, or None, got {kind_of(each)}"
            )
    return several


def check_metrics(name: str, metrics: Any) -> None:
    """Raises TypeError if an argument holds anything but exporters."""
    exporters_of(metrics)


def check_safetensors() -> None:
    """Raises ImportError if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "evidence needs safetensors to write tensors: run "
            f"`pip install safetensors` ({error})"
        ) from error


# The kinds that several arguments share, or that take a sentence to say.
def _several(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


_COMMAS = "; separated by commas"
POSITIVE = Kind(check_positive)
SHARE = Kind(check_share)
FLAG = Kind(check_bool)
PATH = Kind(check_path, str, "PATH")
PATTERNS = Kind(check_names, _several, "PATTERN,...", note=_COMMAS)
PATTERNS_OR_ALL = Kind(
    lambda name, value: check_names(name, value, optional=True),
    _several,
    "PATTERN,...",
    note=_COMMAS,
)
WATCH = Kind(
    check_watch,
    lambda text: text if text == TRIPWIRE else _several(text),
    "tripwire|KIND,...",
    note="; or the kinds of tensors to check, separated by commas",
)
GROUP = Kind(check_group)
ALLOW = Kind(check_allow)
METRICS = Kind(check_metrics)
POLICY = Kind(check_policy, str, choices=ACTIONS)
