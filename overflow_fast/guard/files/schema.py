"""Typed decoding of JSON, by msgspec: what all schemas have in common.

The schema of a format stands with the format, in a module that only its readers
import: a run is guarded without msgspec. Unknown fields are passed over, so a file of
a newer minor version can be read; a field of another type is an error.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, Literal, TypeVar

try:
    import msgspec
except ImportError as _error:
    raise ImportError(
        "files of overflow_fast are read with msgspec: run `pip install msgspec`"
    ) from _error
from msgspec import UNSET, Meta, Struct, UnsetType, field

from .reading import FileError

__all__ = [
    "UNSET",
    "Count",
    "FileError",
    "Head",
    "Index",
    "Lines",
    "Meta",
    "Number",
    "Seconds",
    "StepNumber",
    "Struct",
    "Time",
    "UnsetType",
    "convert",
    "decode",
    "decode_document",
    "field",
    "plain",
]

Index = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
StepNumber = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Time = Annotated[float, Meta(ge=0, le=2.5e11)]  # until the year 9892
Number = float | Literal["inf", "-inf", "nan"]  # see `json_text.to_plain()`

_T = TypeVar("_T")
_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


class Head(Struct):
    """Kind and version of a file, whatever else it holds."""

    kind: Any = None
    schema: Any = None
    overflow_fast: Any = None

    def check_schema(self, newest: int) -> None:
        """Raises FileError if the file's schema is not one up to the newest known."""
        schema = 0 if self.schema is None else self.schema
        if not isinstance(schema, int) or schema > newest:
            writer = self.overflow_fast
            by = "" if writer is None else f", written by overflow_fast {writer!s:.40}"
            raise FileError(
                f"it has schema {schema!r:.20}{by}; this one reads schemas up to "
                f"{newest}: run `pip install -U overflow_fast`"
            )


def head_of(line: bytes | None) -> Head:
    """The head that a file's first line says; an empty one if it says none.

    Args:
        line: The line; None if there is none.
    """
    try:
        return Head() if line is None else decode(line, Head)
    except FileError:
        return Head()


class _Kind(Struct):
    kind: str


def decode(data: bytes | str, kind: type[_T]) -> _T:
    """Decodes JSON of one schema.

    Raises:
        FileError: If it is none, or of another type; says what and where.
    """
    try:
        found: _T = _decoder(kind).decode(data)
    except _ERRORS as error:
        raise FileError(_reason(error)) from error
    return found


def decode_document(data: bytes, kind: type[_T], newest: int) -> _T:
    """Decodes a file of one JSON object whose schema is known; see `decode()`."""
    decode(data, Head).check_schema(newest)
    return decode(data, kind)


class Lines:
    """The schemas of a file's lines, by their `kind`.

    Args:
        kinds: Structs with a tag.
        other: The schema of lines of other kinds; None to pass over them.
    """

    def __init__(self, *kinds: type[Struct], other: type[Struct] | None = None) -> None:
        self._union: Any = functools.reduce(operator.or_, kinds)
        self._known = {kind.__struct_config__.tag for kind in kinds}
        self._other = other

    def decode(self, data: bytes) -> Any:
        """Decodes a line; None for one of a kind that is passed over.

        Raises:
            FileError: If it is damaged.
        """
        try:
            return _decoder(self._union).decode(data)
        except _ERRORS as error:
            if decode(data, _Kind).kind in self._known:
                raise FileError(_reason(error)) from error
        return None if self._other is None else decode(data, self._other)


def convert(value: Any, kind: type[_T]) -> _T:
    """Converts what was decoded without a schema; see `decode()`."""
    try:
        return msgspec.convert(value, kind)
    except _ERRORS as error:
        raise FileError(_reason(error)) from error


def plain(value: Struct) -> dict[str, Any]:
    """A Struct as a dict, without unset fields; bytes stay bytes."""
    found: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return found


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)
