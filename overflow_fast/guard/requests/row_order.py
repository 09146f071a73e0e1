"""The order of a request's rows, where a function between may have changed it.

`SentenceTransformer.encode()`, for one, sorts its texts by their length.
"""

from __future__ import annotations

from threading import get_ident
from types import FrameType

from ...base.source_files import short_name
from ...torch_internals.registry import stack

# Functions of Python, NumPy and torch.
_SORTS = {"argsort", "lexsort", "sort", "sorted"}


class RowOrder:
    """The place in the program where a request was given names for its rows.

    Args:
        frame: Of the code that has begun the request.
    """

    def __init__(self, frame: FrameType) -> None:
        self._thread, self._depth = get_ident(), len(stack(frame))

    def sorted_by(self) -> str:
        """The function between there and here that sorts, with its place; or ""."""
        frames = stack()
        num = len(frames) - (self._depth if self._thread == get_ident() else 0)
        for code in (frame.f_code for frame in frames[: max(0, num)]):
            if not _SORTS.isdisjoint(code.co_names):
                place = f"{short_name(code.co_filename)}:{code.co_firstlineno}"
                return f"{code.co_name}() ({place})"
        return ""
