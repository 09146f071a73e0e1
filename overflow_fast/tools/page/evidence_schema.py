"""The fields of evidence's files: docs/formats.md.

A report is written as its dataclasses are, so their fields are those of the files, and
their docstrings say what these mean; here is what `to_dict()` adds, or writes in
another way.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from ...guard.files.fields import Number, StepNumber, fields_of, meaning, tag_of
from ...guard.report.explanation import Explanation
from ...guard.report.remedy import Remedy
from ...guard.report.report import Report
from ...guard.verdict.verdict import BadEntry, Verdict

_PLAIN = (bool, int, float, str, list, dict, tuple)


def saved_as(cls: Any, more: type[Struct] = Struct, /, **others: Any) -> Any:
    """The Struct of what `asdict()` and `to_plain()` write of a dataclass.

    No field is required: files of older releases lack some.

    Args:
        cls: The dataclass.
        more: The Struct of what is written behind its fields. It gives its kind, too.
        **others: By the names of classes in the fields what stands for these.
    """
    added = ((each.name, each.type, each.default) for each in fields_of(more).values())
    return msgspec.defstruct(
        cls.__name__,
        [*_written_fields(cls, others), *added],
        kw_only=True,
        namespace={"__doc__": more.__doc__},
        tag_field="kind" if tag_of(more) else None,
        tag=tag_of(more) or None,
    )


def _written_fields(cls: Any, others: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The names, types and defaults of what is written of a dataclass.

    A field that is `flat` is a dataclass whose fields are written among those of this
    one, some by another name.
    """
    hints = typing.get_type_hints(cls, localns=dict(others))
    for each in dataclasses.fields(cls):
        if "flat" in each.metadata:
            names = each.metadata["flat"]
            for name, *rest in _written_fields(hints[each.name], others):
                yield names.get(name, name), *rest
        elif each.repr:  # else it is not written
            default = each.default
            if isinstance(each.default_factory, type):
                default = each.default_factory()
            kind = _saved_kind(hints[each.name], cls)
            if default is not None and not isinstance(default, _PLAIN):
                kind, default = kind | UnsetType, UNSET
            where = Meta(extra={"documented": (cls, each.name)})
            yield each.name, Annotated[kind, where], default


_part_of = functools.cache(saved_as)  # one Struct, wherever the part stands


def _saved_kind(kind: Any, within: type[Any]) -> Any:
    """A type of a dataclass's field as it is in the file."""
    if kind in (int, float):
        return StepNumber if kind is int else Number
    if kind is within:
        return dict[str, Any]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _part_of(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin is Literal:
        return kind
    saved = tuple(each if each is ... else _saved_kind(each, within) for each in parts)
    is_union = origin in (typing.Union, types.UnionType)
    return functools.reduce(operator.or_, saved) if is_union else origin[saved]


class Marker(Struct, tag_field="kind", tag="evidence", kw_only=True):
    """`overflow_fast.json`: the folder is of a bad step."""

    schema: Annotated[int | UnsetType, meaning("the version of the format")] = UNSET
    run: Annotated[str | UnsetType, meaning("the id of the run")] = UNSET
    step: Annotated[StepNumber, meaning("the number of the step")]


class _OfEntry(Struct):
    place: Annotated[
        str | UnsetType, meaning("the name of its module, or of the tensor")
    ] = UNSET


class _OfRemedy(Struct):
    outcome: Annotated[str, meaning("what became of the step with it, in words")] = ""
    is_recommended: Annotated[bool, meaning("whether it helps, and breaks nothing")] = (
        True
    )


class _OfExplanation(Struct, tag_field="kind", tag="explanation"):
    """`explanation.json`, and the explanation of a report."""

    schema: Annotated[int | UnsetType, meaning("the version of the format")] = UNSET
    dataset_index: Annotated[
        StepNumber | None, meaning("of `sample`: that in the dataset")
    ] = None
    sample_outlier: Annotated[
        str,
        meaning(
            "of `sample`: how much larger its values are than the others', in words"
        ),
    ] = ""


class _OfReport(Struct, tag_field="kind", tag="report"):
    """`report.json`."""

    schema: Annotated[int | UnsetType, meaning("the version of the format")] = UNSET
    summary: Annotated[str, meaning("its text without the frames")] = ""
    sentences: Annotated[
        list[str] | UnsetType,
        meaning("its sentences, without the explanation and the cost"),
    ] = UNSET


_FIRST, _REMEDY = saved_as(BadEntry, _OfEntry), saved_as(Remedy, _OfRemedy)
_VERDICT = saved_as(Verdict, BadEntry=_FIRST)
SavedExplanation = saved_as(Explanation, _OfExplanation, Remedy=_REMEDY, Sample=int)
SavedReport = saved_as(
    Report, _OfReport, Verdict=_VERDICT, Explanation=SavedExplanation
)

KINDS: tuple[Any, ...] = (Marker, SavedReport, SavedExplanation)
