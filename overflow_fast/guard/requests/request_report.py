"""The report of a bad request."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from ...base.tree import tensors
from ..report.causes import BAD_DATA
from ..report.report import Report
from ..watching.inputs import is_batch_first
from .request import Request
from .request_data import RequestData
from .request_text import RequestText
from .rows import bad_rows

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

    may_be_sorted = False  # rows, so that names have another order; no field

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
            poisoned: What the request has left non-finite; see `LeftState.by()`.
            known: What earlier requests have left non-finite.
        """
        plain = {f.name: getattr(report, f.name) for f in dataclasses.fields(Report)}
        made = cls(**plain, forward=request.forward, ids=request.ids)
        made.num_forwards = max(1, request.num_forwards)
        if request.forward + 1 < request.num_forwards:  # it may have been finite since
            made.verdict = dataclasses.replace(made.verdict, headroom=None)
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
        made.match_rows(request.are_rows_repeated(made.num_rows))
        if request.sorted_by and len(made.ids or ()) > 1 and made.requests:
            made.requests, made.are_requests_known = made.ids, False
            made.may_be_sorted = True
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
        """Takes in what a replay has found: its sample says whose the rows are."""
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
        are_matched = self.rows is not None and self.are_requests_known
        if are_matched or found is None or found.sample is None or not ids:
            return
        if found.num_samples == len(ids) and not self.may_be_sorted:
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


def _size_of(output: Any) -> int | None:
    sizes = (len(tensor) for _, tensor in tensors(output) if tensor.dim())
    return next(sizes, None)
