"""The sizes that losses, inputs and outputs had in the steps before a bad one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import _C
from ..guard.watching.watch import ModelWatch
from ..scanner.text import rounded
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


_MANY = 10.0  # times the largest of the last steps; chosen, not measured


def past_sizes(watches: Sequence[ModelWatch]) -> dict[str, list[float]]:
    """The largest magnitudes of what models were given and returned, by name.

    The oldest first, of finite ones this step's the last. Does not incur a CPU-GPU
    sync.
    """
    return {
        f"{watch.prefix}{label_text(history.last.place.label)}": history.recent
        for watch in watches
        for history in watch.recorder.headroom()
        if history.last.place.kind == _C.FrameKind.FORWARD
        if history.last.place.module == 0
        if history.last.place.label.role in (_C.Role.INPUT, _C.Role.OUTPUT)
    }


def outgrown(sizes: Mapping[str, Sequence[float]]) -> str:
    """Describes what is far larger than in the last steps, or "".

    Args:
        sizes: See `past_sizes()`.
    """
    for name, (*before, now) in sizes.items():
        most = max(before, default=0.0)
        if now > _MANY * most > 0:
            steps = "step" if len(before) == 1 else f"{len(before)} steps"
            return (
                f"the model's `{name}` is up to {now:.3g} in magnitude, "
                f"{rounded(now / most, 2)} times the largest of the last {steps}"
            )
    return ""
