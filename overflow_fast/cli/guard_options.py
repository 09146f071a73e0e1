"""The guard's arguments as options of a command, with their own documentation."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ..guard.config import GuardConfig
from ..guard.guard import OverflowGuard
from ..guard.policy import ACTIONS

_LONG = 150  # characters of a sentence
# An object, a mapping or ranges cannot be typed.
_WITHOUT_OPTION = ("process_group", "allow", "metrics", "ranges")
_SEVERAL = ("include", "exclude", "checkpoints")


def add_guard_options(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each of the guard's arguments that can be typed."""
    group = parser.add_argument_group(
        "options of the guard", "As the arguments of OverflowGuard of the same names."
    )
    documented = _documented()
    for field in fields(GuardConfig):
        if field.name not in _WITHOUT_OPTION:
            group.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=f"guard_{field.name}",
                default=argparse.SUPPRESS,
                help=documented.get(field.name),
                **_kind(field.name, str(field.type)),
            )


def guard_arguments(parsed: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the guard that were typed.

    Raises:
        TypeError, ValueError: If one of them cannot be used.
        ImportError: If one of them needs a library that is missing.
    """
    given = {
        name.removeprefix("guard_"): value
        for name, value in vars(parsed).items()
        if name.startswith("guard_")
    }
    parameters = inspect.signature(OverflowGuard).parameters
    names = [field.name for field in fields(GuardConfig)]
    GuardConfig.of({name: parameters[name].default for name in names} | given)
    return given


def _documented() -> dict[str, str]:
    """The first sentence about each argument."""
    text = inspect.cleandoc(GuardConfig.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", text, re.M | re.S)
    found = {name: _first_sentence(" ".join(told.split())) for name, told in entries}
    for name in _SEVERAL:
        typed = re.sub(r'\["(.*?)"\]', r"\1", found[name])
        found[name] = f"{typed}; separated by commas"
    found["watch"] += "; or the kinds of tensors to check, separated by commas"
    return found


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=[\w`)])\. ", text)[0].rstrip(".")
    if len(sentence) > _LONG:
        sentence = re.split(": | \\(", sentence)[0]
    sentence = re.sub(r"; None for (\w+)", r" (default: \1)", sentence)
    return (sentence[0].lower() + sentence[1:]).replace("%", "%%")


def _kind(name: str, annotation: str) -> dict[str, Any]:
    """How argparse reads an argument of a type."""
    if name == "on_overflow":
        return {"choices": ACTIONS}
    if name == "watch":
        return {"type": _watch, "metavar": "tripwire|KIND,..."}
    if name == "on_spike":
        return {"type": _on_spike, "metavar": "{warn,skip,none}"}
    if name == "saturation":
        return {"type": _saturation, "metavar": "X|none"}
    if name == "explain":
        return {"type": _explain, "metavar": "{auto,true,false}"}
    if annotation == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if annotation.startswith("Literal"):
        return {"choices": tuple(re.findall(r"['\"](\w+)['\"]", annotation))}
    if annotation.startswith("Sequence"):
        unit = "PATH" if "Path" in annotation else "PATTERN"
        return {"type": _several, "metavar": f"{unit},..."}
    number: Callable[[str], Any] | None = {"int": int, "float": float}.get(
        annotation.removesuffix(" | None")
    )
    if number is not None:
        return {"type": number, "metavar": "N" if number is int else "X"}
    return {"metavar": "PATH"}


def _several(text: str) -> Sequence[str]:
    return [each for each in text.split(",") if each]


def _watch(text: str) -> str | Sequence[str]:
    return text if text == "tripwire" else _several(text)


def _explain(text: str) -> bool | str:
    known: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text not in known:
        raise argparse.ArgumentTypeError("must be auto, true or false")
    return known[text]


def _on_spike(text: str) -> str | None:
    known = {"warn": "warn", "skip": "skip", "none": None}
    if text not in known:
        raise argparse.ArgumentTypeError("must be warn, skip or none")
    return known[text]


def _saturation(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number or none") from None
