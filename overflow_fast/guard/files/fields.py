"""The fields of files: their types, and what is said of them.

A format is declared once, as Structs of msgspec, each field with its `meaning()`. From
that follow what is written (`json_text`), what a reader takes for a line
(`files.schema`), the tables of docs/formats.md, and tests of files of older releases.

A field without a default is required: a line that lacks it is damaged. One whose
default is `UNSET` is written only if it is given. Fields that a later release has
added have a default, and say since when.
"""

from __future__ import annotations

import functools
import inspect
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, Struct
from msgspec.structs import FieldInfo

from ...base.text import capitalized, listed_fields

FIRST_RELEASE = "1.0"

_Class = TypeVar("_Class", bound=type)

# A file that has another number, or a longer list, is refused.
Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
StepNumber = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Time = Annotated[float, Meta(ge=0, le=2.5e11)]  # until the year 9892
Number = float | Literal["inf", "-inf", "nan"]  # see `json_text.to_plain()`


def meaning(text: str, *, since: str = FIRST_RELEASE, **more: Any) -> Meta:
    """Describes a field, for docs/formats.md and docstrings.

    Args:
        text: What it is.
        since: The first release that writes it.
        **more: What else a format says of its fields; see `said_of()`.
    """
    return Meta(description=text, extra={"since": since, **more})


@functools.cache
def fields_of(kind: type[Struct]) -> dict[str, FieldInfo]:
    """The fields of a Struct by their attributes, in the order of the file."""
    return {each.name: each for each in msgspec.structs.fields(kind)}


def meaning_of(field: FieldInfo) -> str:
    """The text of a field's `meaning()`; "" for one that has none."""
    return _meta_of(field).description or ""


def said_of(field: FieldInfo, name: str) -> Any:
    """The argument of this name that `meaning()` was given of a field, or None."""
    return (_meta_of(field).extra or {}).get(name)


def _meta_of(field: FieldInfo) -> Meta:
    """The last one of a field: the bounds of its type stand before its meaning."""
    metas: tuple[Meta, ...] = getattr(field.type, "__metadata__", (Meta(),))
    return metas[-1]


def default_of(field: FieldInfo) -> Any:
    """The value that a reader takes where a file lacks a field; None for no default."""
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return None if field.default in (NODEFAULT, UNSET) else field.default


def tag_of(kind: type[Struct]) -> str:
    """The `kind` that the lines of a Struct have; "" for a part of a line."""
    tag = kind.__struct_config__.tag
    return "" if tag is None else str(tag)


def documented(cls: _Class) -> _Class:
    """Lists the fields of a Struct in its docstring."""
    if cls.__doc__:  # python -OO has none
        own = fields_of(cls).items()
        listed = listed_fields((n, f"{capitalized(meaning_of(e))}.") for n, e in own)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nAttributes:\n{listed}"
    return cls
