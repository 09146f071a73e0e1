"""The sizes that the loss had in the steps before a bad one."""

from __future__ import annotations

from collections.abc import Sequence

from .. import _C
from ..guard.watching.watch import ModelWatch
from ..scanner.tree import label_text


def past_losses(watches: Sequence[ModelWatch]) -> list[float]:
    """The finite magnitudes of the loss in the last steps, of this one, too.

    That is what was recorded, or what a model returned, under the name "loss". Does not
    incur a CPU-GPU sync.
    """
    found: list[float] = []
    for watch in watches:
        for history in watch.recorder.headroom():
            place = history.last.place
            is_returned = place.kind == _C.FrameKind.FORWARD and place.module == 0
            is_own = is_returned or place.kind == _C.FrameKind.RECORDED
            if is_own and label_text(place.label) == "loss":
                found += history.recent
    return found
