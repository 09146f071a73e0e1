"""The inputs of a model: the batch, or values that the training loop has computed."""

from __future__ import annotations

from collections.abc import Sequence

from ... import _C
from ...base.tree import label_text
from ..watching.inputs import Given, WeakTensor
from ..watching.watch import ModelWatch
from .bad_frames import BadFrame
from .call_order import Called, Calls
from .verdict import BATCH, NonModuleOrigin, Origin


def caller_of(watch: ModelWatch) -> NonModuleOrigin:
    """Names the code that calls a watched model, such as "the training loop"."""
    return NonModuleOrigin(watch.inputs.caller)


def origin_of_given(
    frame: BadFrame, inputs: Sequence[_C.Entry], outermost: Called, calls: Calls
) -> Origin:
    """Makes the origin: the batch if a trainer has noted it as bad, else the loop's."""
    watch, call = outermost
    caller = caller_of(watch)
    loop = watch.inputs.loop_batches.of(call.batch)
    places = [place_of(frame, entry) for entry in inputs]
    if loop is not None and all(_place_in_loop(frame, entry) for entry in inputs):
        maker = f"the batch, as {outermost.name} received it: {', '.join(places)}"
        return Origin("given", "batch", maker, [BATCH], batch_places=places)
    earlier = calls.last_within(None, call.order)
    after = "" if earlier is None else earlier.name
    is_computed = all(entry.is_computed for entry in inputs)
    if is_computed or (loop is not None and loop.bad_places() == []):
        where = f"between {after} and" if after else "before"
        maker = f"{caller}, {where} {outermost.name}"
        return Origin("passed_on", "caller", maker, [caller], after)
    maker = f"the batch or from {caller}"
    maker += f", which had called {after} before" if after else ""
    maker += f", as {outermost.name} received it" if call.module else ""
    maker += f": {', '.join(places)}"
    of_batch = [] if loop is not None else places
    candidates: list[str] = [BATCH, caller]
    return Origin("given", "unclear", maker, candidates, after, batch_places=of_batch)


def held(frame: BadFrame, label: _C.Label) -> WeakTensor:
    """Returns an input that the training loop gave a model, held weakly."""
    return _given(frame).find(label_text(label))


def _given(frame: BadFrame) -> Given:
    """Returns all inputs that the training loop gave a model."""
    given = frame.watch.inputs.given.get(frame.frame.batch)
    return Given() if given is None or frame.frame.module else given


def place_of(frame: BadFrame, entry: _C.Entry) -> str:
    """Returns the place of an outermost call's input in the batch, or in the call."""
    place = _place_in_loop(frame, entry)
    return place or _given(frame).place_of(label_text(entry.label), frame.watch.model)


def _place_in_loop(frame: BadFrame, entry: _C.Entry) -> str:
    """Returns the place of an outermost call's input in the trainer's batch, or ""."""
    loop = frame.watch.inputs.loop_batches.of(frame.frame.batch)
    if loop is None:
        return ""
    return loop.place_of(held(frame, entry.label).tensor(), frame.watch.model)


def batch_remarks(first: BadFrame) -> list[str]:
    """Writes where the batch that a trainer has noted is non-finite, in sentences.

    Incurs a CPU-GPU sync for each tensor of the batch.
    """
    noted = first.watch.inputs.loop_batches.of(first.frame.batch)
    if noted is None:
        return []
    places = noted.bad_places(first.watch.model)
    return [f"The batch is non-finite: {', '.join(places)}."] if places else []
