"""The walk over a call that dynamo traces; the extension has the one of eager mode.

Both follow the rule of `tree`; here objects that do not declare what they hold are not
opened: see `_parts_of()`. The extension decides how each value is listed, by
its path.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any
from urllib.parse import quote

import torch

from ..base.tree import ATTRIBUTE as _ATTRIBUTE
from ..base.tree import INDEX as _INDEX
from ..base.tree import KEY as _KEY
from ..base.tree import MAX_DEPTH, Style, is_declared, layout, plain_key, type_name
from .compiled_boundary import CALLS, PARAMETERS, STRICT

# A traced call as the constant of its operator; see `csrc/record/traced_text.h`.


# Marks of the constant: the beginnings of a label, and its parts.
INPUT, OUTPUT, NAME = "i", "o", "="
QUIET_OUTPUT = "O"  # what is listed only if it is bad
INDEX, KEY, ATTRIBUTE = "#", "@", "!"
_INTEGER_KEY, _TUPLE_KEY = "*", "("
# Kinds of items.
NONE, NOT_TENSOR, NOT_SCANNED, TENSOR = "n", "x", "w", "t"
OPAQUE = "u"  # a value that was not looked into; its type is in the path's place
_RETURNED, _KNOWN, _KNOWN_AND_PASSED = "r", "k", "g"
# Frames.
FORWARD, BACKWARD, RECORDED = "F", "B", "R"

# The mark and the value of each part; a key may also be a tuple of texts and numbers.
Label = tuple[tuple[str, Any], ...]
# A value in dynamo's trace: the path of its label, and its kind.
Item = tuple[Label, str]
# A frame's kind, the class's name, whether the root's call ends, whether there is a
# frame (else its items are only counted), whether the root has returned a loss.
Header = tuple[str, str, bool, bool, bool]


def make_item(path: Label, kind: str = TENSOR) -> Item:
    return path, kind


def header_text(header: Header) -> str:
    frame, class_name, is_root, has_frame, has_loss = header
    flags = f"{'r' * is_root}{'f' * has_frame}{'l' * has_loss}"
    return f"{frame}{flags}:{_quoted(class_name)}"


def tensor_text(
    path: Label, number: int, is_new: bool, is_passed: bool, is_returned: bool
) -> str:
    """Writes a tensor's item.

    Args:
        path: Its label.
        number: Its number in earlier and later operators, or -1.
        is_new: True if no earlier operator takes it.
        is_passed: True if this operator takes it.
        is_returned: True if the compiled code returns it, which makes it new.

    Returns:
        The text.
    """
    kind = _KNOWN_AND_PASSED if is_passed else _KNOWN
    if is_new:
        kind = _RETURNED if is_returned else TENSOR
    return f"{kind}{number if number >= 0 else ''}:{_path(path)}"


def item_text(path: Label, kind: str, why: str = "") -> str:
    """Writes an item without a tensor."""
    reason = f":{_quoted(why)}" if kind == NOT_SCANNED else ""
    return f"{kind}:{_path(path)}{reason}"


def id_of(text: str) -> int:
    """Returns a number below 2**63 that stands for a text, in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _path(path: Label) -> str:
    return "".join(_part(mark, value) for mark, value in path)


def _part(mark: str, value: Any) -> str:
    if isinstance(value, tuple):
        items = "".join(_part(KEY, each) for each in value)
        return f"{_TUPLE_KEY}{len(value)}{items}"
    if isinstance(value, str):
        return mark + _quoted(value)
    return f"{_INTEGER_KEY if mark == KEY else mark}{int(value)}"


def _quoted(text: str) -> str:
    return quote(text, safe="", errors="surrogatepass")


# Entries with the tensors of those that are one.
Entries = list[tuple[Item, Any]]

_INPUT: Label = ((INPUT, ""),)
_OUTPUT: Label = ((OUTPUT, ""),)


def opaque_name(kind: type) -> str:
    """The name of a type whose objects are not opened and may hold tensors, or "".

    Dynamo calls it while it traces.
    """
    known = layout(kind)
    has_parts = known.has_dict or known.slots or known.is_asked
    is_iterable = any("__iter__" in vars(base) for base in kind.__mro__)
    if not known.may_hide or not (has_parts or is_iterable):
        return ""
    is_opened_elsewhere = known.is_open and has_parts
    return f"{type_name(kind)}{' (in compiled code)' if is_opened_elsewhere else ''}"


def wraps_of(kind: type) -> str:
    """The attribute whose dict's items objects of a type show as theirs, or ""."""
    return layout(kind).wraps


def deep_name(kind: type) -> str:
    """The name of a type whose object is nested too deep to be opened."""
    return f"{type_name(kind)} (nested too deep)"


def walk(
    plan: int,
    module: Any,
    args: Any,
    kwargs: Any,
    output: Any,
    inputs: Entries,
    outputs: Entries,
) -> None:
    """Lists the entries of a call: its module's parameters, its inputs, its outputs."""
    if plan & PARAMETERS:
        for key, parameter in module.named_parameters(recurse=False):
            inputs.append((make_item(((NAME, key),)), parameter))
    if plan & CALLS:
        _walk_inputs(plan, args, kwargs, inputs)
        _walk_outputs(plan, output, outputs)


def _walk_inputs(plan: int, args: Any, kwargs: Any, entries: Entries) -> None:
    opened: list[Any] = []
    if not isinstance(args, tuple):
        entries.append(_flat(args, _INPUT))
    else:
        for i, value in enumerate(args):
            label = (*_INPUT, (INDEX, i))
            entries.append(_flat(value, label))
            if not plan & STRICT and not isinstance(value, torch.Tensor):
                found, _ = _walk_parts(value, label, 1, entries, opened, False)
                entries += found
    if plan & STRICT or not isinstance(kwargs, dict):
        return
    for name, value in kwargs.items():
        label = (*_INPUT, (ATTRIBUTE, name))
        if isinstance(value, torch.Tensor):
            entries.append(_flat(value, label))
        elif not _is_plain(value):
            has_line = _parts_of(value, wraps_of(type(value))) is not None
            found, has_tensor = _walk_parts(value, label, 1, entries, opened, False)
            entries += found
            if has_line and not has_tensor:
                entries.append(_flat(value, label))


def _walk_outputs(plan: int, output: Any, entries: Entries) -> None:
    opened: list[Any] = []
    if not isinstance(output, tuple):
        _walk_output(plan, output, _OUTPUT, 1, entries, opened)
        return
    for i, part in enumerate(output):
        label = (*_OUTPUT, (INDEX, i))
        if not isinstance(part, tuple):
            _walk_output(plan, part, label, 2, entries, opened)
            continue
        for j, inner in enumerate(part):
            _walk_output(plan, inner, (*label, (INDEX, j)), 3, entries, opened)
        _walk_beside(plan, part, label, 3, entries, opened)
    _walk_beside(plan, output, _OUTPUT, 2, entries, opened)


def _walk_beside(
    plan: int,
    output: tuple[Any, ...],
    label: Label,
    depth: int,
    entries: Entries,
    opened: list[Any],
) -> None:
    """Lists the tensors in the attributes of a tuple whose items are listed."""
    if plan & STRICT:
        return
    for _, name, value, _ in _attributes_beside(output):
        part = ((QUIET_OUTPUT, ""), *label[1:], (ATTRIBUTE, name))
        found, _ = _walk_value(value, part, depth, entries, opened, True)
        entries += [each for each in found if each[1] is not None]


def _walk_output(
    plan: int, value: Any, label: Label, depth: int, entries: Entries, opened: list[Any]
) -> None:
    if plan & STRICT:
        entries.append(_flat(value, label))
    else:
        found, _ = _walk_value(value, label, depth, entries, opened, False)
        entries += found


def _walk_value(
    value: Any,
    label: Label,
    depth: int,
    entries: Entries,
    opened: list[Any],
    is_quiet: bool,
) -> tuple[Entries, bool]:
    """Lists a value: its tensors, or itself if there is none.

    Returns:
        Its entries, and whether one of them is a tensor that is always listed. What is
        opaque is added to `entries` at once.
    """
    if isinstance(value, torch.Tensor):
        return [_flat(value, label)], not is_quiet
    found: Entries = []
    has_tensor = False
    if not _is_plain(value):
        found, has_tensor = _walk_parts(value, label, depth, entries, opened, is_quiet)
    if not has_tensor and not is_quiet:
        found = [_flat(value, label), *found]
    return found, has_tensor


def _walk_parts(
    value: Any,
    label: Label,
    depth: int,
    entries: Entries,
    opened: list[Any],
    is_quiet: bool,
) -> tuple[Entries, bool]:
    """Lists what is within a value; nothing but quiet tensors if no other is there."""
    if _is_plain(value) or _is_opened(value, opened):
        return [], False
    wraps = wraps_of(type(value))
    parts = _parts_of(value, wraps)
    if parts is None:
        _note(opaque_name(type(value)), entries)
        return [], False
    if depth > MAX_DEPTH:
        if not all([_is_plain(child) for _, _, child, _ in parts]):
            _note(deep_name(type(value)), entries)
        return [], False
    opened.append(value)
    if wraps != "" and isinstance(getattr(value, wraps, None), dict):
        wrapped = getattr(value, wraps)
        if _is_opened(wrapped, opened):
            return [], False
        opened.append(wrapped)
    listed: Entries = []
    quiet: Entries = []
    has_tensor = False
    for style, key, child, is_beside in parts:
        is_hushed = is_quiet or is_beside
        part = (*label, (_mark(style), plain_key(key)))
        if is_hushed and label[0][0] == OUTPUT:
            part = ((QUIET_OUTPUT, ""), *part[1:])
        found, is_listed = _walk_value(
            child, part, depth + 1, entries, opened, is_hushed
        )
        listed += found
        has_tensor = has_tensor or is_listed
        if not is_listed:
            quiet += [each for each in found if each[1] is not None]
    return (listed, True) if has_tensor else (quiet, False)


def _note(name: str, entries: Entries) -> None:
    if name != "":
        entries.append((make_item(((NAME, name),), OPAQUE), None))


def _is_opened(value: Any, opened: list[Any]) -> bool:
    # Dynamo does not compare tuples and deques by their identities.
    if isinstance(value, (tuple, deque)):
        return False
    for each in opened:  # noqa: SIM110  (dynamo traces it)
        if type(each) is type(value) and each is value:
            return True
    return False


def _flat(value: Any, label: Label) -> tuple[Item, Any]:
    if isinstance(value, torch.Tensor):
        return make_item(label), value
    return make_item(label, NONE if value is None else NOT_TENSOR), None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, complex, str, bytes))


def _mark(style: str) -> str:
    return KEY if style == _KEY else ATTRIBUTE if style == _ATTRIBUTE else INDEX


# What a value holds: dynamo follows plain attribute access, and has no descriptors.


def _parts_of(value: Any, wraps: str = "") -> list[tuple[Style, Any, Any, bool]] | None:
    """Lists what a container or an object holds, as `tree.children()` does.

    Dynamo compiles again where one of the parts has another type, so that objects which
    do not declare what they hold are not opened.

    Args:
        value: Any value.
        wraps: What `layout()` has of its type, where that is known.

    Returns:
        The style, the key and the value of each part, and whether it is an attribute
        beside the items of a container or a wrapped dict; None for a leaf.
    """
    if isinstance(value, (tuple, list, deque)):
        if type(value) is torch.Size:
            return None
        items = [(_INDEX, i, child, False) for i, child in enumerate(value)]
        return items + _attributes_beside(value)
    if isinstance(value, dict):
        is_model_output = hasattr(type(value), "__dataclass_fields__")
        style: Style = _ATTRIBUTE if is_model_output else _KEY
        items = [(style, key, child, False) for key, child in dict.items(value)]
        return items + [
            part
            for part in _attributes_beside(value)
            if dict.get(value, part[1]) is not part[2]
        ]
    if not is_declared(value) and wraps == "":
        return None
    names = names_held(value)
    if wraps not in names or not isinstance(getattr(value, wraps), dict):
        return [(_ATTRIBUTE, name, getattr(value, name), wraps != "") for name in names]
    wrapped = getattr(value, wraps)
    items = [(_KEY, key, child, False) for key, child in dict.items(wrapped)]
    return items + [
        (_ATTRIBUTE, name, getattr(value, name), True)
        for name in names
        if name != wraps
    ]


def _attributes_beside(value: Any) -> list[tuple[Style, Any, Any, bool]]:
    """Lists what a container of a subclass holds beside its items."""
    if type(value) in (tuple, list, deque, dict):
        return []
    return [
        (_ATTRIBUTE, name, getattr(value, name), True) for name in names_held(value)
    ]


def names_held(value: Any) -> list[str]:
    """Lists the names of the attributes and slots that an object has."""
    names = list(vars(value)) if hasattr(value, "__dict__") else []
    for base in reversed(type(value).__mro__):
        slots = getattr(base, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else sorted(slots):
            is_held = name not in ("__dict__", "__weakref__") and hasattr(value, name)
            if is_held and name not in names:
                names.append(name)
    return names
