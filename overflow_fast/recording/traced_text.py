"""A traced call as the constant of its operator; see `csrc/record/traced_text.h`."""

from __future__ import annotations

import hashlib
from typing import Any
from urllib.parse import quote

# Marks of the constant: the beginnings of a label, and its parts.
INPUT, OUTPUT, NAME = "i", "o", "="
QUIET_OUTPUT = "O"  # what is listed only if it is bad
INDEX, KEY, ATTRIBUTE = "#", "@", "!"
_INTEGER_KEY, _TUPLE_KEY = "*", "("
# Kinds of items.
NONE, NOT_TENSOR, NOT_SCANNED, TENSOR = "n", "x", "w", "t"
OPAQUE = "u"  # a value that was not looked into; its type is in the path's place
_RETURNED, _KNOWN = "r", "k"
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


def tensor_text(path: Label, number: int, is_new: bool, is_returned: bool) -> str:
    """Writes a tensor's item.

    Args:
        path: Its label.
        number: Its number in earlier and later operators, or -1.
        is_new: True if the operator takes it.
        is_returned: True if the compiled code returns it.

    Returns:
        The text.
    """
    kind = (_RETURNED if is_returned else TENSOR) if is_new else _KNOWN
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
