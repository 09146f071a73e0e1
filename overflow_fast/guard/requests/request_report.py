"""The report of a bad request: whose it is, and what of it is left in state."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...base.modules import named_buffers
from ...base.tensors import widened
from ...base.tree import Path, path_text, tensors
from ...scanner.ops import are_nonfinite
from ..report.causes import BAD_DATA
from ..report.report import Report
from ..watching.inputs import is_batch_first, is_plain
from ..watching.watch import ModelWatch
from .held_call import HeldCall
from .request import Request
from .request_data import RequestData
from .request_text import RequestText

_SORTED = "`ids` may be in another order than rows: {} sorts."
_ARGUMENT = re.compile(r"^(input\[\d+\]|\w+)")  # before the path within it


class RequestReport(RequestData, Report):
    """A guard's findings in a request: a `Report` whose step is the request's number.

    Attributes:
        forward: Which of the request's forwards was the first bad one, from 0.
        num_forwards: How many it has run.
        token: The new token of each row that this forward was to give, from 0; None
            where the request makes no text.
        ids: The program's names of those that it is for, one a row; None for none.
        rows: The rows of the output that are not finite; None where it has no rows.
        num_rows: How many rows it has; 0 where that is not known.
        requests: The names, out of `ids`, of those whose rows are not finite; all
            where rows and names cannot be matched; None where no names were given.
        are_requests_known: Whether rows and names could be matched.
        poisoned: What is kept from forward to forward, and holds a nan or an inf now
            that this request has left there: its rows by its name, None for all.
        left_by: The earlier request that has left what the first bad value came from.
    """

    _is_sorted = False  # rows may have another order than names

    @classmethod
    def of(
        cls,
        report: Report,
        request: Request,
        poisoned: Mapping[str, list[int] | None],
        known: Mapping[str, str],
    ) -> RequestReport:
        """Makes it of a plain report, and of what the request has left.

        Incurs a CPU-GPU sync for each tensor on a device that is looked at.

        Args:
            report: The plain report.
            request: The request.
            poisoned: What the request has left non-finite; see `left_in_state()`.
            known: What earlier requests have left non-finite.
        """
        plain = {f.name: getattr(report, f.name) for f in dataclasses.fields(Report)}
        made = cls(**plain, forward=request.forward, ids=request.ids)
        made.num_forwards = max(1, request.num_forwards)
        if request.is_text and request.num_forwards > 1:
            made.token = request.forward
        call, model = request.bad, report_model(request)
        if call is not None and is_batch_first(model):
            sizes = call.sizes
            num = len(request.ids or ())
            size = num if num in sizes else next(iter(sizes), None)
            made.rows, made.num_rows = bad_rows(call.output, size)
        elif request.output is not None:
            size = _size_of(request.output) if request.ids is None else len(request.ids)
            made.rows, made.num_rows = bad_rows(request.output, size)
        made.match_rows()
        if request.sorted_by and len(made.ids or ()) > 1 and made.requests:
            made.requests, made.are_requests_known = made.ids, False
            made._is_sorted = True
            made.notes.append(_SORTED.format(request.sorted_by))
        made.poisoned = dict(poisoned)
        first = report.verdict.first
        if first is not None:
            origin = report.verdict.origin
            names = [first.label, *origin.candidates, origin.maker]
            left = (by for name, by in known.items() if any(name in n for n in names))
            made.left_by = next(left, "")
        return made

    def note_explained(self) -> None:
        """Takes in what a replay has found: the sample is the row, if none is known."""
        found, ids = self.explanation, self.ids
        if found is not None and found.cause == BAD_DATA.name:  # it was so before
            path = _ARGUMENT.sub("", found.tensor)
            for name in list(self.poisoned):
                is_given = _ARGUMENT.sub("", name) == path and name[:6] == "input["
                if is_given or name == found.tensor:
                    del self.poisoned[name]
        if found is not None and self.left_by:  # it was zeroed when it was allocated
            text = f"clear what {self.left_by} has left in `{found.tensor}`"
            found.remedies = [
                dataclasses.replace(each, text=text, code="")
                if each.code.endswith(".zero_()")
                else each
                for each in found.remedies
            ]
        if self.rows is not None or found is None or found.sample is None or not ids:
            return
        if found.num_samples == len(ids) and not self._is_sorted:
            self.requests = [ids[int(found.sample)]]
            self.are_requests_known = True

    @property
    def _text(self) -> RequestText:
        return RequestText(self)

    def line(self) -> str:
        """Writes the request, what was bad, and the cause, in one line."""
        return self._text.line()


def report_model(request: Request) -> torch.nn.Module | None:
    """The model of a request's first bad frame."""
    return request.frames[0].watch.model if request.frames else None


def bad_rows(output: Any, size: int | None) -> tuple[list[int] | None, int]:
    """The rows of what a forward has returned that hold a nan, or else an inf.

    Incurs a CPU-GPU sync for each tensor on a device.

    Args:
        output: What it has returned.
        size: How many rows it was given.

    Returns:
        The rows, and how many there are; None and 0 where the output has none.
    """
    all_of = [each for _, each in tensors(output) if is_plain(each)]
    found = [each for each in all_of if each.dim() and len(each) == size]
    if size is None or not found:
        return None, 0
    for is_bad in (_is_nan_or_inf, _is_not_finite):  # -inf alone may be a mask
        places = set[int]()
        for tensor in found:
            bad = is_bad(widened(tensor)).reshape(size, -1).any(1)
            places.update(bad.nonzero().flatten().tolist())
        if places:
            return sorted(places), size
    others = [each for each in all_of if all(each is not one for one in found)]
    if any(bool(_is_nan_or_inf(widened(each)).any()) for each in others):
        return None, 0  # such as a loss, which is of all rows
    return [], size


def _size_of(output: Any) -> int | None:
    sizes = (len(tensor) for _, tensor in tensors(output) if tensor.dim())
    return next(sizes, None)


def _is_nan_or_inf(values: torch.Tensor) -> torch.Tensor:
    return values.isnan() | (values == torch.inf)


def _is_not_finite(values: torch.Tensor) -> torch.Tensor:
    return ~values.isfinite()


def left_in_state(
    call: HeldCall | None, watches: Sequence[ModelWatch], known: Mapping[str, str]
) -> Iterator[tuple[str, list[int] | None]]:
    """Yields what a forward has written non-finite values to, with their rows.

    Incurs a CPU-GPU sync for each tensor on a device that is looked at.

    Args:
        call: The forward, of which nothing was run again yet.
        watches: The watched models.
        known: What earlier requests have left non-finite.
    """
    named: list[tuple[str, torch.Tensor]] = []
    if call is not None:
        given = [
            (_label(path, call), tensor)
            for path, tensor in tensors((call.args, call.kwargs))
        ]
        written = set(map(id, call.written([tensor for _, tensor in given])))
        named += [pair for pair in given if id(pair[1]) in written]
        known_ids = {id(tensor) for _, tensor in given}
        named += [
            (f"output{path_text(path)}", tensor)
            for path, tensor in tensors(call.output)
            if len(path) > 2 and id(tensor) not in known_ids
        ]
    state = None if call is None else call.state
    own = set(map(id, [] if state is None else state.written_buffers()))
    for watch in watches:
        if watch.model is not None and own:
            buffers = named_buffers(watch.model)
            named += [
                (f"{watch.prefix}{name}", each)
                for name, each in buffers
                if id(each) in own
            ]
    new = [pair for pair in named if is_plain(pair[1]) and pair[0] not in known]
    are_bad = are_nonfinite(tensor for _, tensor in new)
    for name, tensor in itertools.compress(new, are_bad):
        bad = _is_nan_or_inf(widened(tensor))
        if not bool(bad.any()):
            continue
        rows = bad.reshape(len(tensor), -1).any(1) if tensor.dim() else bad
        places = rows.nonzero().flatten().tolist() if tensor.dim() else []
        yield name, None if len(places) == rows.numel() else places


def _label(path: Path, call: HeldCall) -> str:
    """The place of an argument's tensor: `past_key_values.layers[0].keys`."""
    is_keyword = path[0].value == 1
    name = str(path[1].value) if is_keyword else f"input[{path[1].value}]"
    return f"{name}{path_text(path[2:])}"
