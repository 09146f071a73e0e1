"""Decodes JSON that anyone may have made: what the readers of all formats share.

Unknown fields are passed over, so a file of a newer minor version can be read; a field
of another type is an error, which says where it is, what was expected and what came.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .fields import tag_of
from .reading import FileError

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
        found: _T = _decoder_of(kind).decode(data)
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
        kinds: Structs with a kind; lines of other kinds are passed over.
    """

    def __init__(self, *kinds: type[Struct]) -> None:
        self._union: Any = functools.reduce(operator.or_, kinds)
        self._known = set(map(tag_of, kinds))

    def decode(self, data: bytes) -> Any:
        """Decodes a line; None for one of a kind that is passed over.

        Raises:
            FileError: If it is damaged.
        """
        try:
            return _decoder_of(self._union).decode(data)
        except _ERRORS as error:
            if decode(data, _Kind).kind in self._known:
                raise FileError(_reason(error)) from error
        return None


def convert(value: Any, kind: type[_T]) -> _T:
    """Converts what was decoded without a schema; see `decode()`."""
    try:
        found: _T = msgspec.convert(value, kind)
    except _ERRORS as error:
        raise FileError(_reason(error)) from error
    return found


def plain(value: Any) -> dict[str, Any]:
    """Converts what was decoded to a dict, without unset fields; bytes stay bytes."""
    found: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return found


_decoder_of: Any = functools.cache(msgspec.json.Decoder)


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)
