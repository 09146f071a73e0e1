"""The fields of files, each declared once: its type, meaning, default, and since when.

From a declaration follow the line that is written (`Written.line`), what a reader takes
for one (`files.schema`), the tables of docs/formats.md, and tests of files of older
releases. Needs no package: a run is guarded without msgspec.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import Field as DataclassField
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from ...scanner.text import capitalized, listed_fields

FIRST_RELEASE = "1.0"

_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Bounds:
    """The numbers and lengths that a file may have; a reader refuses others."""

    ge: int | float | None = None
    le: int | float | None = None
    min_length: int | None = None
    max_length: int | None = None


Index = Annotated[int, Bounds(ge=0, le=2**31 - 1)]
Count = Annotated[int, Bounds(ge=0, le=2**62)]
StepNumber = Annotated[int, Bounds(ge=-(2**62), le=2**62)]
Seconds = Annotated[float, Bounds(ge=0)]
Time = Annotated[float, Bounds(ge=0, le=2.5e11)]  # until the year 9892
Number = float | Literal["inf", "-inf", "nan"]  # see `json_text.to_plain()`

REQUIRED: Any = object()  # in place of a default: a line without the field is damaged
ABSENT: Any = object()  # in place of a default: what is read lacks the field as well


@dataclass(frozen=True)
class Field:
    """A field of a line.

    Attributes:
        meaning: What it is, for docs/formats.md and docstrings.
        default: What a reader takes where a file lacks it; or `REQUIRED`, `ABSENT`.
        since: The first release that writes it. A later one has a default.
        name: Its name in the file, if that is not the attribute's.
        kind: Its type in the file, if that is not the attribute's.
        is_in_file: Whether it is; a reader may find others out.
        more: What else a format says of its fields.
    """

    meaning: str
    default: Any = REQUIRED
    since: str = FIRST_RELEASE
    name: str | None = None
    kind: Any = None
    is_in_file: bool = True
    more: Mapping[str, Any] = field(default_factory=dict)

    def of(self, line: Mapping[str, Any], key: str) -> Any:
        """Its value in a line, or its default; `key` is its attribute."""
        is_there = self.default is not REQUIRED and self.default is not ABSENT
        return line.get(self.name or key, self.default if is_there else None)

    @property
    def drawn(self) -> str:
        """The words in front of its picture, if a number has one; else nothing."""
        return str(self.more.get("drawn", ""))


def written(
    meaning: str,
    default: Any = REQUIRED,
    *,
    since: str = FIRST_RELEASE,
    name: str | None = None,
    kind: Any = None,
    **more: Any,
) -> Any:
    """Declares a field of a line or of a dataclass; see `Field`."""
    return _declared(Field(meaning, default, since, name, kind, True, more))


def derived(meaning: str, default: Any = REQUIRED, **more: Any) -> Any:
    """Declares a field of a dataclass that a reader finds out, and no file has."""
    return _declared(Field(meaning, default, is_in_file=False, more=more))


def _declared(own: Field) -> Any:
    metadata, default = {"declared": own}, own.default
    if isinstance(default, (dict, list)):
        return field(default_factory=default.copy, metadata=metadata)
    if default is REQUIRED or default is ABSENT:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def documented(cls: _Class) -> _Class:
    """Lists the fields of a dataclass in its docstring."""
    if cls.__doc__:  # python -OO has none
        own = declared_in(cls).items()
        listed = listed_fields((n, f"{capitalized(each.meaning)}.") for n, each in own)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nAttributes:\n{listed}"
    return cls


class Written:
    """A line of a file, or a part of one, as its fields declare it.

    Args:
        kind: The field `kind` of its lines; "" for a part of one.
        of: A dataclass whose fields stand among those of the line, before them.
    """

    KIND: ClassVar[str] = ""
    OF: ClassVar[type[Any] | None] = None

    def __init_subclass__(cls, kind: str = "", of: type[Any] | None = None) -> None:
        cls.KIND, cls.OF = kind or cls.KIND, of

    @classmethod
    def line(cls, **values: Any) -> dict[str, Any]:
        """Makes what is written, its kind in front; see `line_of()`."""
        return {"kind": cls.KIND, **line_of(cls, **values)}


def line_of(cls: Any, **values: Any) -> dict[str, Any]:
    """Makes what is written of fields, given by their attributes; others are left out.

    Raises:
        TypeError: If there is no such field, or one that is required is not given.
    """
    found, known = {}, fields_of(cls)
    if not values.keys() <= known.keys():
        raise TypeError(f"{cls.__name__} has no {values.keys() - known.keys()}")
    for key, each in known.items():
        if key in values:
            found[each.name or key] = values[key]
        elif each.default is REQUIRED:
            raise TypeError(f"{cls.__name__} needs {key}")
    return found


@functools.cache
def declared_in(cls: Any) -> dict[str, Field]:
    """The fields of a line or of a dataclass, by their attributes, in their order."""
    found: dict[str, Field] = {}
    for each in reversed(cls.__mro__):
        of = vars(each).get("OF")
        found |= {} if of is None else declared_in(of)
        own = vars(each).get("__dataclass_fields__") or vars(each)
        for name, value in own.items():
            if isinstance(value, DataclassField):
                found[name] = value.metadata["declared"]
    return found


@functools.cache
def fields_of(cls: Any) -> dict[str, Field]:
    """Those of them that are in the file."""
    return {name: each for name, each in declared_in(cls).items() if each.is_in_file}
