"""The fields of evidence's files: docs/formats.md.

A report is written as its dataclasses are, so their fields are those of the files, and
their docstrings say what these mean; here is what `to_dict()` adds, or writes in
another way.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import types
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...guard.files.fields import Number, StepNumber, fields_of, meaning, tag_of
from ...guard.report.explanation import Explanation, Remedy
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
    hints = typing.get_type_hints(cls, localns=others)
    own: list[Any] = []
    for each in dataclasses.fields(cls):
        if not each.repr:
            continue  # it is not written
        kind, default = _saved_kind(hints[each.name], cls), each.default
        if isinstance(each.default_factory, type):
            default = each.default_factory()
        if default is None or isinstance(default, _PLAIN):
            own.append((each.name, kind, default))
        else:
            own.append((each.name, kind | UnsetType, UNSET))
    own += [(each.name, each.type, each.default) for each in fields_of(more).values()]
    docs = (each.__doc__ for each in (more, cls) if each is not Struct)
    return msgspec.defstruct(
        cls.__name__,
        own,
        kw_only=True,
        namespace={"__doc__": "\n\n".join(inspect.cleandoc(doc or "") for doc in docs)},
        tag_field="kind" if tag_of(more) else None,
        tag=tag_of(more) or None,
    )


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
    """Of an entry that is bad."""

    place: Annotated[
        str | UnsetType, meaning("the name of its module, or of the tensor")
    ] = UNSET


class _OfRemedy(Struct):
    """Of a remedy."""

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
