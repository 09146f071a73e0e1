"""The words of an explanation: its rows, the one remedy last, its code on own lines."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence

from ...base.text import counted, printable
from .causes import SINGULAR_GRADIENT, UNKNOWN
from .findings import Findings
from .gist import BETWEEN, expression_of, gist_of, on_rank, parted
from .op_words import IN_FLOAT64
from .remedy import Remedy, Worth

_FEW = 3  # sentences of a kind, and ends of a chain; chosen
_FEW_SHORT = 2  # of each kind of sentence in an exception
_MAX_CODE = 70  # characters of a line of code: with its label, a terminal's 80
_MAX_LIST = 90  # of what did not help
_NONE_KEEPS = "no change that was tried keeps the value"


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

    def short_rows(self) -> list[str]:
        """Those of an exception, but for the attempts and the remedies."""
        return _written([*self._rows(is_short=True)])

    def remedy_rows(self) -> list[str]:
        """The attempts in a line, and the remedy: at most one of a kind."""
        chosen = self._helped[:1]
        others = (each for each in self._helped if each.kind != chosen[0].kind)
        chosen += itertools.islice(others, 1)
        tried = [*self._nearest(), *self._tried(chosen)]
        return _written([*self._attempts(most=_MAX_LIST), *tried])

    @property
    def _helped(self) -> list[Remedy]:
        return [each for each in self.found.remedies if each.is_recommended]

    def _rows(self, is_short: bool = False) -> Iterator[tuple[str, str]]:
        """All but attempts and remedies; with `is_short`, those of an exception."""
        found, sample = self.found, self.found.sample
        most = _FEW_SHORT if is_short else _FEW
        evidence = self._left([*found.evidence, found.reason])
        notes = self._left(found.other_notes if is_short else found.notes)
        if found.news:
            yield "new", found.news
        yield from self._code()
        if not is_short or (self.gist() and found.op is not None):
            yield "cause", f"{self._what()}{self._where()}"
        if found.op is not None and found.op.called_from:
            yield "your line", found.op.called_from
        if is_short:
            evidence = [e for e in evidence if not e.startswith(IN_FLOAT64)]
        for sentence in evidence[:most]:
            yield "evidence", sentence
        if found.forward is not None:
            yield "forward", "{} of the step's {}".format(*found.forward)
        adds = sample is not None and (sample.outlier or sample.dataset is not None)
        if adds or (sample is not None and not is_short):
            yield "sample", self._sample_text()
        if len(found.chain) > 1 and not is_short:
            yield "chain", _shortened(found.chain)
        for sentence in notes[:most]:
            yield "note", sentence
        if found.replays and not is_short:
            seconds = f"{found.seconds:.2f} s"
            yield "replays", f"{counted(found.replays, 'forward')}, {seconds}"

    def _left(self, sentences: Sequence[str]) -> list[str]:
        """Sentences, but for what the first line has of one."""
        stated = self.found.stated
        left = [parted(each)[1] if each == stated else each for each in sentences]
        return [each for each in left if each]

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

    def _attempts(self, most: int = 0) -> Iterator[tuple[str, str]]:
        """Attempts that failed, and those not made where nothing helped.

        With `most` no line is spent on those that are far off, beside one that is not.
        """
        remedies = self.found.remedies
        told = [*self._helped, self.found.nearest]
        if most and self._helped:
            told += [each for each in remedies if each.worth == Worth.FAR]
        failed = [each for each in remedies if each.tried and each not in told]
        if failed:
            labels = [f"{self._label(e)}{e.harm and f' ({e.harm})'}" for e in failed]
            yield "did not help:", _listed(labels, most)
        not_tried = [each for each in remedies if not each.tried]
        if not_tried and not self._helped:
            labels = [f"{self._label(e)}{': ' * bool(e.why)}{e.why}" for e in not_tried]
            yield "not tried", _listed(labels, most)

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


def _listed(texts: Sequence[str], most: int) -> str:
    """Texts in a line, each once; with `most`, as many as fit that many characters."""
    texts = list(dict.fromkeys(texts))
    shown = list(texts)
    while most and len(shown) > 1 and len("; ".join(shown)) > most:
        shown.pop()
    more = len(texts) - len(shown)
    return "; ".join([*shown, *([f"{more} more"] if more else [])])


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
    first = max(0, min(begin, begin - (room - (end - begin)) // 2))
    first = min(first, max(0, len(code) - room))
    last = min(len(code), first + room)
    while first < begin and _is_in_word(code, first):
        first += 1
    while last > end and _is_in_word(code, last):
        last -= 1
    before, after = "... " * (first > 0), " ..." * (last < len(code))
    shift = len(before) - first
    begin, end = begin + shift, min(end, last) + shift
    return f"{before}{code[first:last]}{after}", begin, max(begin, end)


def _is_in_word(code: str, i: int) -> bool:
    """True if a name or number goes on from before a place to behind it."""
    return 0 < i < len(code) and f"_{code[i - 1]}{code[i]}".isidentifier()


def _shortened(chain: list[str]) -> str:
    if len(chain) > 2 * _FEW:
        chain = [*chain[:_FEW], "...", *chain[-_FEW:]]
    return " -> ".join(chain)
