"""Which infs are meant.

A mask is made of -inf, of which a softmax makes 0. That is no failure, nor is what
passes it on: a search for the origin of bad values does not end there. Where infs
come from decides, never where they arrive, and a nan is never meant. But one that the
code or the batch has (`is_asked`) is no origin of what an operation returns that leaves
nan out, such as nanmedian: that had nothing else.

- A tensor from before the replay is a mask (`Leaf.is_mask`) if it holds -inf and no
  other kind: a buffer, or another constant of a module. In a batch or an object all
  other values have to be 0, and without a graph: else it is data, or a result such as
  a log. An unknown tensor is meant if -inf alone was read of it.
- An operation that reads nothing bad has asked for its infs if they are -inf and it
  was given such a number: `masked_fill(mask, -inf)`. +inf is always reported.
- One that reads nothing bad but what is meant passes that on (`returns_meant`). Where
  it returns other kinds, or fewer values (`OpCall.reduces`: all of a row may have
  been masked), it is computed again in float64, and its infs are meant unless the
  true result is finite: an overflow beside a mask is reported.

If the loss itself holds infs that are meant, the mask has gone beyond itself: at the
first operation that `reduces`, found by `OpCall.masks` (`masked_whole`).
"""

from __future__ import annotations

from .op_call import OpCall, Source
from .tensor_kinds import NAN, NEGATIVE_INF


def is_meant(source: Source, kinds: int = 0) -> bool:
    """True if the infs of a source were asked for, as those of a mask are.

    Args:
        source: The source.
        kinds: The kinds of non-finite values that were read of it; 0 at the end of a
            search, where an unknown tensor is the origin.
    """
    if isinstance(source, OpCall):
        return source.is_meant
    if source.kind == "unknown":  # such as a constant
        return kinds == NEGATIVE_INF
    return source.is_mask


def is_asked(source: Source) -> bool:
    """True if a source's bad values are numbers of the code, or of the batch."""
    return source.is_asked if isinstance(source, OpCall) else source.kind == "batch"


def returns_meant(op: OpCall, kinds: int, given: int) -> bool:
    """True if an operation has asked for its infs, or passes on infs that are meant.

    Args:
        op: The operation, which has read nothing bad but what is meant.
        kinds: The kinds of non-finite values that it has returned.
        given: The kinds that it has read.
    """
    if kinds & NAN:
        return False
    if not given:
        return kinds == NEGATIVE_INF and bool(op.is_constant or op.numbers)
    return not kinds & ~given
