"""The words of an explanation: its rows, the one remedy last, its code on own lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from enum import IntEnum

from ...base.text import capitalized, counted, printable
from .causes import SINGULAR_GRADIENT, UNKNOWN
from .findings import Findings
from .gist import BETWEEN, expression_of, gist_of, on_rank, parted
from .remedy import Remedy

_FEW = 3  # operations at each end of a chain, whose cut is seen; chosen
_MAX_CODE = 70  # characters of a line of code: with its label, a terminal's 80
_NONE_KEEPS = "no change that was tried keeps the value"


class Need(IntEnum):
    """The rows of an exception, what a reader needs most first."""

    REMEDY = 0
    NEW = 1
    LINE = 2
    ORIGIN = 3
    MARK = 4
    NEXT = 5


class ExplanationText:
    """The lines of an explanation.

    Args:
        found: The explanation.
    """

    def __init__(self, found: Findings) -> None:
        self.found = found

    def text(self) -> str:
        """The answer in a line, and all rows, the remedies last."""
        gist, why = self.gist(), self.why_unknown()
        first = gist or (why and f"Unknown why: {why}")
        return "\n".join([*([printable(f"{first}.")] if first else []), *self.rows()])

    def gist(self) -> str:
        """The cause in a clause, with its place; "" where it is not known."""
        if self.found.is_finite:
            return capitalized(self.found.stated)
        return "" if self.found.cause == UNKNOWN.name else gist_of(self.found)

    def why_unknown(self) -> str:
        """The one reason why the cause is not known, or ""."""
        clause = "" if self.gist() else parted(self.found.stated)[0]
        return f"{clause[0].lower()}{clause[1:]}" if clause[1:2].islower() else clause

    def rows(self) -> list[str]:
        """All rows: label and text, the remedies last."""
        return _written(self._all())

    def parts(self) -> list[tuple[str, str, str]]:
        """All rows: label, text, and the code below it."""
        parts = list[tuple[str, str, str]]()
        for label, text in self._all():
            first, _, code = text.partition("\n")
            if not label:  # the marks below a line
                code = f"{parts.pop()[2]}\n{text}"
                parts.append(("code", "", code))
            elif label == "code":
                parts.append((label, "", text))
            else:
                parts.append((label, first, textwrap.dedent(code)))
        return parts

    def _all(self) -> list[tuple[str, str]]:
        tried = [*self._nearest(), *self._tried(self._helped)]
        return [*self._rows(), *self._attempts(), *tried]

    def needed(self) -> list[tuple[Need, list[str]]]:
        """The rows of an exception above its remedies, each with its need."""
        found = self.found
        code = [_written([row]) for row in self._code()]
        needs = [Need.LINE, Need.MARK]
        rows = [(Need.NEW, _written([("new", found.news)]))] if found.news else []
        rows += list(zip(needs, code, strict=False))
        if found.op is not None and found.op.called_from:
            rows.append((Need.NEW, _written([("your line", found.op.called_from)])))
        if not self.gist():  # of the reason why, the first line has the beginning
            rows += [
                (Need.NEW, _written([("note", each)]))
                for each in self._left([*dict.fromkeys(found.notes)])[:1]
            ]
        return rows

    def needed_remedies(self) -> list[tuple[Need, list[str]]]:
        """The first remedy, and the next one of another kind."""
        told = self._helped
        others = [each for each in told if each.kind != told[0].kind]
        rows = [*self._nearest(), *self._tried([*told[:1], *others[:1]])]
        needs = [Need.REMEDY, Need.NEXT]
        return [(n, _written([row])) for n, row in zip(needs, rows, strict=False)]

    @property
    def _helped(self) -> list[Remedy]:
        return [each for each in self.found.remedies if each.is_recommended]

    def _rows(self) -> Iterator[tuple[str, str]]:
        """All but attempts and remedies."""
        found = self.found
        if found.news:
            yield "new", found.news
        yield from self._code()
        if not found.is_finite:
            yield "cause", f"{self._what()}{self._where()}"
        if found.op is not None and found.op.called_from:
            yield "your line", found.op.called_from
        for sentence in self._left([*found.evidence, found.reason]):
            yield "evidence", sentence
        if found.forward is not None:
            yield "forward", "{} of the step's {}".format(*found.forward)
        if found.sample is not None:
            yield "sample", self._sample_text()
        if len(found.chain) > 1:
            yield "chain", _shortened(found.chain)
        for sentence in self._left([*dict.fromkeys(found.notes)]):
            yield "note", sentence
        if found.replays:
            seconds = f"{found.seconds:.2f} s"
            yield "replays", f"{counted(found.replays, 'forward')}, {seconds}"

    def _left(self, sentences: Sequence[str]) -> list[str]:
        """Sentences, but for what the first line has of one."""
        stated, told = self.found.stated, self.gist()
        left = [parted(each)[1] if each == stated else each for each in sentences]
        return [each for each in left if each and each not in told]

    def _code(self) -> Iterator[tuple[str, str]]:
        """The line that failed, and marks below the expression in it that did."""
        op = self.found.op
        if op is None or not op.code:
            return
        code, begin, end = cut_around(op.code, op.columns)
        yield "code", code
        is_cut = code not in op.code
        if expression_of(op) and (is_cut or 2 * (end - begin) < len(code)):
            yield "", f"{' ' * begin}{'^' * (end - begin)}"

    def _attempts(self) -> Iterator[tuple[str, str]]:
        """Attempts that failed, and those that were not made."""
        remedies = self.found.remedies
        told = [*self._helped, self.found.nearest]
        failed = [each for each in remedies if each.tried and each not in told]
        if failed:
            labels = [f"{self._label(e)}{e.harm and f' ({e.harm})'}" for e in failed]
            yield "did not help:", _listed(labels)
        not_tried = [each for each in remedies if not each.tried]
        if not_tried:
            labels = [f"{self._label(e)}{': ' * bool(e.why)}{e.why}" for e in not_tried]
            yield "not tried", _listed(labels)

    def _nearest(self) -> Iterator[tuple[str, str]]:
        """The change of code that comes nearest, where none keeps the value."""
        nearest = self.found.nearest
        if nearest is None:
            return
        others = [each for each in self.found.remedies if each.keeps_running]
        is_nearer = any(e.off < nearest.off and not e.is_of_data for e in others)
        where = " that has code to write" * is_nearer
        yield "nearest", f"{_NONE_KEEPS}; the nearest{where}: {nearest}"

    def _tried(self, remedies: Sequence[Remedy]) -> Iterator[tuple[str, str]]:
        for remedy in remedies:
            yield "tried", str(remedy)

    def _label(self, remedy: Remedy) -> str:
        """The text of a remedy, with what tells it from those with other results."""
        if remedy.is_finite and remedy.misses == "output":
            return f"{remedy.text} ({remedy.outcome})"
        others = [
            each
            for each in self.found.remedies
            if each.text == remedy.text
            and (each.tried, each.is_finite) != (remedy.tried, remedy.is_finite)
        ]
        if not others:
            return remedy.text
        if any(each.place == remedy.place for each in others):
            place = f"{remedy.place}: " if remedy.place else ""
            return f"{remedy.text}: {place}{remedy.code or 'in words'}"
        parts = [part.place for each in others for part in each.parts]
        return f"{remedy.text} ({remedy.place}{' alone' * (remedy.place in parts)})"

    def _what(self) -> str:
        found = self.found
        cause = found.cause
        if found.is_overflow and found.op is not None and found.op.outputs:
            cause += f" ({found.op.outputs[0].dtype})"
        in_phase = (
            f" in {found.phase}" if found.phase in ("backward", "optimizer") else ""
        )
        if found.is_behind_backward:
            in_phase = f" {BETWEEN}"
        is_value = found.cause != SINGULAR_GRADIENT.name  # and no derivative
        if found.is_seen_in_backward and is_value:
            in_phase = " in the forward, seen in backward"
        return f"{cause}{in_phase}{on_rank(found)}"

    def _where(self) -> str:
        found = self.found
        if found.op is None:
            names = [f"`{found.tensor}`"] if found.tensor else []
            names += [f"in {found.module}"] if found.module and not found.tensor else []
            return ": " + " ".join(names) if names else ""
        module = f" in {found.module}" if found.module else ""
        is_open = found.op.place and not self.gist()  # else the first line has it
        place = f" ({found.op.place})" if is_open else ""
        return f": {found.op.name}{module}{place}"

    def _sample_text(self) -> str:
        sample = self.found.sample
        assert sample is not None
        of = f" of {self.found.num_samples}" if self.found.num_samples else ""
        dataset = sample.dataset
        index = "" if dataset is None else f", index {dataset} of the dataset"
        outlier = f": {sample.outlier}" if sample.outlier else ""
        return f"{int(sample)}{of} (counted from 0){index}{outlier}"


def _written(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows as lines; a text of several has its own below it."""
    lines = []
    for label, text in rows:
        first, *rest = text.split("\n")
        lines += [printable(f"{label:<9} {first}"), *map(printable, rest)]
    return lines


def _listed(texts: Sequence[str]) -> str:
    """Texts in a line, each once."""
    return "; ".join(dict.fromkeys(texts))


def cut_around(code: str, columns: tuple[int, int] | None) -> tuple[str, int, int]:
    """A line of code, cut so that an expression in it is seen.

    Args:
        code: The line.
        columns: Where the expression begins and ends, or None.

    Returns:
        The text, and where the expression, or as much of it as fits, stands in it.
    """
    begin, end = columns or (0, 0)
    if code[end:].lstrip().startswith("#") and end:
        code = code[:end]
    if len(code) <= _MAX_CODE:
        return code, begin, end
    room = _MAX_CODE - len("... ") - len(" ...")
    # Of an expression that does not fit, half of the line is enough.
    least = end if end - begin <= room else begin + room // 2
    first = 0 if least <= room else begin - max(0, room - (end - begin)) // 2
    first = min(first, len(code) - room)
    is_end = len(code) <= first + room + len(" ...")
    last = len(code) if is_end else first + room
    while first < begin and _is_in_word(code, first):
        first += 1
    while last > min(end, begin + 1) and _is_in_word(code, last):
        last -= 1
    before, after = "... " * (first > 0), " ..." * (last < len(code))
    shift = len(before) - first
    begin, end = begin + shift, min(end, last) + shift
    return f"{before}{code[first:last].rstrip()}{after}", begin, max(begin, end)


def _is_in_word(code: str, i: int) -> bool:
    """True if a name or number goes on from before a place to behind it."""
    return 0 < i < len(code) and f"_{code[i - 1]}{code[i]}".isidentifier()


def _shortened(chain: list[str]) -> str:
    if len(chain) > 2 * _FEW:
        chain = [*chain[:_FEW], "...", *chain[-_FEW:]]
    return " -> ".join(chain)
