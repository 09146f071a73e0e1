"""Typed decoding of JSON, by msgspec: what readers of all formats have in common.

What is read of a line follows from the declaration of its fields (`files.fields`). Only
readers import this module: a run is guarded without msgspec. Unknown fields are passed
over, so a file of a newer minor version can be read; a field of another type is an
error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import re
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

try:
    import msgspec
except ImportError as _error:
    raise ImportError(
        "files of overflow_fast are read with msgspec: run `pip install msgspec`"
    ) from _error
from msgspec import UNSET, Meta, Struct, UnsetType, field

from . import fields
from .fields import ABSENT, REQUIRED, Written, declared_in, fields_of, written
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
    "StepNumber",
    "Struct",
    "UnsetType",
    "convert",
    "decode",
    "decode_document",
    "field",
    "plain",
]

_T = TypeVar("_T")
_ERRORS = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_UNIONS = (typing.Union, types.UnionType)


def _read_as(kind: Any) -> Any:
    """A type of a declaration as msgspec takes it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin is Literal:
        is_read = not isinstance(kind, type) or issubclass(kind, Struct)
        return kind if is_read or not fields_of(kind) else struct_of(kind)
    if origin is Annotated:
        (bounds,) = kind.__metadata__
        if isinstance(bounds, Meta):
            return kind
        given = {name: each for name, each in vars(bounds).items() if each is not None}
        return Annotated[_read_as(kind.__origin__), Meta(**given)]
    read = tuple(each if each is ... else _read_as(each) for each in parts)
    return functools.reduce(operator.or_, read) if origin in _UNIONS else origin[read]


if TYPE_CHECKING:
    from .fields import Count, Index, Number, StepNumber
else:
    Count, Index = _read_as(fields.Count), _read_as(fields.Index)
    Number, StepNumber = _read_as(fields.Number), _read_as(fields.StepNumber)


@functools.cache
def kinds_of(cls: Any) -> dict[str, Any]:
    """The types of the fields in the file, by their attributes."""
    hints = {} if cls.__dict__.get("OF") is None else kinds_of(cls.__dict__["OF"])
    hints = {**hints, **typing.get_type_hints(cls, include_extras=True)}
    return {
        name: hints[name] if each.kind is None else each.kind
        for name, each in fields_of(cls).items()
    }


@functools.cache
def struct_of(cls: Any) -> type[Struct]:
    """The Struct that is read of a declaration, which is one of its bases.

    Args:
        cls: A subclass of `Written`, or a dataclass whose fields are `written()`.
    """
    kinds, own = kinds_of(cls), []
    for name, each in fields_of(cls).items():
        kind, default = _read_as(kinds[name]), dict[str, Any]()
        if each.default is ABSENT:
            kind, default = kind | UnsetType, {"default": UNSET}
        elif isinstance(each.default, (dict, list)):
            default = {"default_factory": each.default.copy}
        elif each.default is not REQUIRED:
            default = {"default": each.default}
        own.append((name, kind, field(name=each.name, **default)))
    is_line = issubclass(cls, Written)
    tag = {"tag_field": "kind", "tag": cls.KIND} if is_line and cls.KIND else {}
    bases = (cls, Struct) if is_line else (Struct,)
    return msgspec.defstruct(cls.__name__, own, bases=bases, kw_only=True, **tag)


_MEANING = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.MULTILINE)


@functools.cache
def written_as(cls: Any, **others: Any) -> Any:
    """The declaration of what `asdict()` writes of a dataclass, as it and its docstring
    say it.

    No field is required: files of older releases lack some.

    Args:
        cls: The dataclass.
        **others: By the names of classes in its fields what stands for these.
    """
    hints = typing.get_type_hints(cls, localns=others)
    meanings = dict(_MEANING.findall(inspect.cleandoc(cls.__doc__ or "")))
    own: dict[str, Any] = {"__annotations__": {}}
    for each in dataclasses.fields(cls):
        if "flat" in each.metadata:  # its fields are written among these
            part, names = written_as(hints[each.name]), each.metadata["flat"]
            for key, inner in declared_in(part).items():
                name = names.get(key, key)
                own[name] = written(inner.meaning, inner.default)
                own["__annotations__"][name] = kinds_of(part)[key]
        elif each.repr:  # else it is not written
            default = each.default
            if isinstance(each.default_factory, type):
                default = each.default_factory()
            is_plain = default is None or isinstance(default, _PLAIN)
            text = " ".join(meanings.get(each.name, "").split()).rstrip(".")
            text = text[:1].lower() + text[1:]
            own[each.name] = written(text, default if is_plain else ABSENT)
            own["__annotations__"][each.name] = _as_written(hints[each.name], cls)
    return types.new_class(cls.__name__, (Written,), exec_body=lambda n: n.update(own))


_PLAIN = (bool, int, float, str, list, dict, tuple)


def _as_written(kind: Any, within: type[Any]) -> Any:
    """A type of a dataclass's field as `asdict()` and `to_plain()` write it."""
    if kind in (int, float):
        return StepNumber if kind is int else Number
    if kind is within:
        return dict[str, Any]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return written_as(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is None or origin is Literal:
        return kind
    read = tuple(each if each is ... else _as_written(each, within) for each in parts)
    return functools.reduce(operator.or_, read) if origin in _UNIONS else origin[read]


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
        kinds: Declarations with a kind.
        other: That of lines of other kinds; None to pass over them.
    """

    def __init__(self, *kinds: Any, other: Any = None) -> None:
        self._union: Any = functools.reduce(
            operator.or_, (struct_of(each) for each in kinds)
        )
        self._known = {kind.KIND for kind in kinds}
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
        found: _T = msgspec.convert(value, _read_as(kind))
    except _ERRORS as error:
        raise FileError(_reason(error)) from error
    return found


def plain(value: Any) -> dict[str, Any]:
    """Converts what was decoded to a dict, without unset fields; bytes stay bytes."""
    found: dict[str, Any] = msgspec.to_builtins(value, builtin_types=(bytes,))
    return found


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        _decoders[kind] = msgspec.json.Decoder(_read_as(kind))
    return _decoders[kind]


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)
