"""A remedy: a change that was tried on a bad step, and what came of it."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import dataclass
from enum import IntEnum

from ...base.source_files import installed_name, short_name
from ...base.text import rounded

# Of gradients: more than float32 rounds in most networks. With a smaller one, the same
# function in another form is said to change the other samples.
SAME = 1e-3
_MOST_MOVED = 1e6  # a change of results is written up to here, and no larger
_TIMES = 10.0  # an error is written as a factor from here on, below in percent
# Of the true loss, and of the true gradients, of which half precision alone misses up
# to 0.49 in benchmarks/answers: what misses more keeps neither; chosen.
_FAR = {"loss": 0.1, "gradients": 0.5}
_INDENT = " " * 4


class Worth(IntEnum):
    """The worth of a remedy, as its trial has shown; a smaller one is worth more."""

    HELPS = 0  # the step is finite with it, near what is right, and nothing breaks
    FAR = 1  # finite, but loss or gradients are far off the true ones
    HARMS = 2  # finite, but the output is far off, or the run breaks later
    FAILS = 3  # not finite
    UNTRIED = 4


@dataclass(frozen=True)
class Elsewhere:
    """The changes that a remedy makes of a batch that is finite without it.

    The weights and dropout masks are the same.

    Attributes:
        moved: By how much the gradients change, relative to them (L2 norms over all
            parameters); None where that was not measured.
        losses: The loss without the remedy and with it; None if it is not known.
        left_out: The sample that was left out of this batch, since it fails; None if
            it is the batch of the last clean step.
    """

    moved: float | None = None
    losses: tuple[float, float] | None = None
    left_out: int | None = None

    @property
    def change(self) -> float:
        """The larger change of loss and gradients; 0 for one as rounding makes it."""
        change = max(self._change_of_loss, self.moved or 0.0)
        return change if change > SAME else 0.0

    @property
    def _change_of_loss(self) -> float:
        """The change of the loss, relative to it."""
        before, after = self.losses or (0.0, 0.0)
        if before == after:
            return 0.0
        return abs(after - before) / abs(before) if before else math.inf

    def __str__(self) -> str:
        """The change in words."""
        clean = "the last clean batch" if self.left_out is None else ""
        if self.losses is not None and self._change_of_loss > SAME:
            before, after = self.losses
            change = f"the loss is {after:.4g} instead of {before:.4g}"
            where = f"with {clean}" if clean else f"without sample {self.left_out}"
            return f"{where} {change}"
        if self.change:
            whose = f"{clean}'s" if clean else "the other samples'"
            return f"{whose} gradients change by {self.moved:.2g} of their norm"
        stay = (
            f"{clean} stays as it is" if clean else "the other samples stay as they are"
        )
        return f"{stay}, within 0.1 %"


@dataclass(frozen=True)
class Remedy:
    """A change that was tried on the very step that is explained.

    Attributes:
        text: What is changed, in words, such as "add 1e-8 inside the sqrt".
        code: The code of the change. It replaces the lines `line` to `last_line` of
            `file` where there is a file; else it is called before the run. Lines from
            the second on have their indentation. "" where `text` tells all: where it
            has no text that says the same, or is of an installed package.
        tried: Whether the step was replayed with it.
        is_finite: Whether its outputs, loss and gradients were finite then.
        loss: The loss that came out; None if it is not known.
        file: The file of the line that it replaces, or "".
        line: The number of the first line that it replaces, or 0.
        last_line: That of the last one.
        parts: The changes that it is made of, where it is made of several, each with
            its own `file` and `line`. They belong together. Where `file` is "", they
            are in several files, or far from one another, or not all in a file.
        why: Why it was not tried; "" if it was.
        plain_loss: The loss of the step without it, where gradients alone were bad.
        usual: The range of the magnitudes of the losses before, where the loss is far
            beyond it and no true one is known; else None.
        true_loss: The loss in float64, or where the failing call has no value there,
            of an exact form in float64; None where it is not known.
        error: How far the loss is from that, relative to it; where the loss is right,
            and gradients are not, how far these are (L2 norm). Of a forward without
            backward, how far its output is from that of a run in float32, or of one in
            float64 where nothing is half precision; inf for another shape. None where
            the true loss is beyond the dtype's maximum, which no remedy comes to, and
            where nothing is known.
        compared_with: The dtype of that run.
        misses: "loss", "gradients" or "output", where that is more than rounding
            explains.
        breaks: What is wrong though the step is finite, in words: the loss, or a
            gradient, is 1e5 times the median of the last ones and not known to be
            right, or the last clean batch is not finite with it. Then it is no remedy.
            "" for nothing.
        leaves: What may make the next steps fail, in words: a buffer that is a thousand
            times as large after the step with it, as the statistics of a batch norm, or
            a call that divides by a number near 0; or "".
        elsewhere: What it changes where nothing fails; None where it was not measured.
        moves_results: The largest change of those results of the changed calls that
            were finite without it, relative to the largest of them; 0 where all of them
            were seen to stay as they were. None where that is not known, or it is the
            same in exact arithmetic.
        is_flat: Whether all gradients are 0 with it.
        stops_gradient: Whether no gradient goes through where it acts.
        is_of_data: Whether it changes the batch, and no code.
        modules: The modules that it runs in float32, by name; empty for another remedy.
        until: Those after which values are half precision again; see `keep_in_fp32`.
        in_float64: Whether calls are computed in float64 with it.
        rank: The rank whose share of the step was run, of several; else None.
    """

    text: str
    code: str = ""
    tried: bool = True
    is_finite: bool = False
    loss: float | None = None
    file: str = ""
    line: int = 0
    last_line: int = 0
    parts: tuple[Remedy, ...] = ()
    why: str = ""
    plain_loss: float | None = None
    usual: tuple[float, float] | None = None
    true_loss: float | None = None
    error: float | None = None
    compared_with: str = "float32"
    misses: str = ""
    breaks: str = ""
    leaves: str = ""
    elsewhere: Elsewhere | None = None
    moves_results: float | None = None
    is_flat: bool = False
    stops_gradient: bool = False
    is_of_data: bool = False
    modules: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    in_float64: bool = False
    rank: int | None = None

    @functools.cached_property
    def worth(self) -> Worth:
        """Its worth, as the trial has shown; by how much it is off is `off`."""
        if not self.tried:
            return Worth.UNTRIED
        if not self.is_finite:
            return Worth.FAILS
        if self.breaks or self.misses == "output":
            return Worth.HARMS
        most = _FAR.get(self.misses, math.inf)
        # Gradients that are all 0 lead nowhere, and no other way.
        is_flat = self.is_flat and self.misses == "gradients"
        if self.misses and not is_flat and (self.error is None or self.error > most):
            return Worth.FAR
        return Worth.HELPS

    @property
    def _step(self) -> Elsewhere:
        """The change of the step itself, whose loss was finite without it."""
        if self.loss is None or self.plain_loss is None:
            return Elsewhere()
        return Elsewhere(losses=(self.plain_loss, self.loss))

    @property
    def off(self) -> float:
        """How far it is off what is right; inf where its dtype does not hold that."""
        if self.true_loss is not None and self.error is None:
            return math.inf
        return (self.error or 0.0) if self.misses else 0.0

    @property
    def change(self) -> float:
        """The change of results that are finite without it; 0 if none was seen.

        Of this step the true loss and gradients tell, where they are known.
        """
        own = max(self.moves_results or 0.0, self._step.change)
        if self.elsewhere is None:
            return own if own > SAME else 0.0
        is_true = self.true_loss is not None and not self.misses
        return max(0.0 if is_true or own <= SAME else own, self.elsewhere.change)

    @property
    def is_recommended(self) -> bool:
        """True if it was tried, made the step finite, is near and breaks nothing."""
        return self.worth == Worth.HELPS

    @property
    def keeps_running(self) -> bool:
        """True if it is recommended, but for how far it is off what is true."""
        return self.worth <= Worth.FAR

    @property
    def is_right(self) -> bool:
        """True if it helps, misses nothing and leaves nothing, as far as known."""
        return self.is_recommended and not (self.misses or self.leaves)

    @property
    def harm(self) -> str:
        """The reason why it is no remedy though the step is finite with it, or ""."""
        if self.worth == Worth.FAR:
            return f"a loss of {self.loss:.3g}: {self._error_text().strip(', ()')}"
        return self.breaks

    def __str__(self) -> str:
        """The remedy and what came of it, and its code on lines below.

        Of several parts each has its place beside it.
        """
        codes = [self.code]
        if any(each.code for each in self.parts):  # else the text has said all
            codes = [each._code_and_place for each in self.parts]
        at = f" ({self.place})" if self.place else ""
        codes = [textwrap.indent(code, _INDENT) for code in codes if code]
        return "\n".join([f"{self.text}{at}: {self.outcome}", *codes])

    @property
    def _code_and_place(self) -> str:
        if self.code:
            return f"{self.code}{'  # ' * bool(self.place)}{self.place}"
        return f"{self.text}{f' ({self.place})' * bool(self.place)}"

    @property
    def kind(self) -> str:
        """The change: of "code", of "data", or of the "run": weights and settings."""
        if self.is_of_data:
            return "data"
        return "code" if self.file or any(each.file for each in self.parts) else "run"

    @property
    def outcome(self) -> str:
        """The result of the trial, and what it costs where nothing fails."""
        if not self.tried:
            return "not tried"
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        loss += f" instead of {self.plain_loss:.4g}" if self._step.change else ""
        if self.usual is not None:
            loss += " ({:.3g} to {:.3g} in magnitude before)".format(*self.usual)
        on_rank = "" if self.rank is None else f" on rank {self.rank}"
        finite = f"finite{loss}{on_rank}{self._error_text()}"
        clauses = [finite if self.is_finite else "not finite"]
        if self.breaks:
            clauses.append(f"but {self.breaks}")
        if self.error is not None and self.true_loss is None:
            off = f"{rounded(100 * self.error, 2)} % from {self.compared_with}"
            if math.isinf(self.error):
                off = f"of another shape than in {self.compared_with}"
            clauses[0] += f", {'but ' * bool(self.misses)}{off}"
        if self.elsewhere is not None and self.elsewhere.moved is not None:
            clauses.append(str(self.elsewhere))
        elif self.moves_results is not None and self.moves_results > SAME:
            by = f"{min(self.moves_results, _MOST_MOVED):.2g} of the largest"
            clauses.append(f"changes results that were finite by up to {by}")
        elif self.moves_results == 0:
            clauses.append("results that were finite stay as they are")
        if self.is_flat:
            clauses.append(f"all gradients are 0{' there' * bool(on_rank)}")
        elif self.stops_gradient:
            clauses.append("no gradient where it acts")
        if self.leaves:
            clauses.append(f"but {self.leaves}")
        return "; ".join(clauses)

    @property
    def place(self) -> str:
        """The files that it changes, each with the lines around all changes; or ""."""
        parts = [each for each in self.parts or (self,) if each.file]
        lines = dict[str, tuple[int, int]]()
        for part in sorted(parts, key=lambda part: part.line):
            first, last = lines.get(part.file, (part.line, 0))
            lines[part.file] = first, max(last, part.last_line)
        places = " and ".join(
            f"{short_name(file)}:{first}{f'-{last}' * (last > first)}"
            for file, (first, last) in lines.items()
        )
        return places + ", installed" * any(installed_name(e.file) for e in parts)

    def _error_text(self) -> str:
        if not self.misses or self.true_loss is None or self.loss is None:
            return ""
        size = abs(self.true_loss)
        distance = abs(self.loss - self.true_loss)
        is_small = self.error is not None and self.error * size < distance / 2
        if self.error is None or (is_small and self.misses == "loss"):
            return f" (the true one is {self.true_loss:.3g})"
        by = f"{self.error:.2g} times" if self.error >= _TIMES else f"{self.error:.0%}"
        if self.misses == "gradients":
            return f", gradients {by} off the true ones"
        return f", {by} off the true {self.true_loss:.4g}"
