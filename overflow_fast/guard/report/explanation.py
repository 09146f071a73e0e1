"""The answer to an alarm: which operation made the first bad value, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ...scanner.text import counted, nonfinite_text, printable, short_name
from .causes import NOT_REPRODUCIBLE, SINGULAR_GRADIENT, UNKNOWN, Cause

# The operation that failed, with its inputs and outputs, and the sample.


@dataclass(frozen=True)
class TensorSummary:
    """The values of one tensor in numbers.

    Attributes:
        dtype: Its dtype, such as "float16".
        shape: Its shape.
        abs_min: The smallest magnitude of its finite values, or None if there is none.
        abs_max: The largest one.
        num_nan: How many of its elements are nan.
        num_inf: How many are inf or -inf.
        signs: Those of the infs: "+", "-", "+-", or "" if there are none.
        name: What it was of before the step: "`fc.weight`" for a weight, a buffer or an
            input, "part of `fc.weight`"; or "".
    """

    dtype: str
    shape: tuple[int, ...]
    abs_min: float | None
    abs_max: float | None
    num_nan: int
    num_inf: int
    name: str = ""
    signs: str = ""

    @property
    def numel(self) -> int:
        """The number of its elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def is_finite(self) -> bool:
        """True if none of its elements is nan, inf or -inf."""
        return not (self.num_nan or self.num_inf)

    def nonfinite_text(self, has_numel: bool = True) -> str:
        """Writes how many of its elements are non-finite, of how many."""
        numel = self.numel if has_numel else 0
        return nonfinite_text(self.num_nan, self.num_inf, self.signs, numel)


@dataclass
class Op:
    """An operation that turned finite values into non-finite ones.

    In backward, `name` is the operation of the forward whose derivative failed, and
    `inputs` and `outputs` are those of `derivative`, which computed it.

    Attributes:
        name: Its name, such as "aten.div.Tensor".
        file: The file of the line that called it, the user's and not torch's, or "".
        line: The number of that line, or 0.
        code: The line's text.
        stack: The lines that led to it, the outermost first.
        inputs: The float tensors that it was given.
        outputs: The float tensors that it returned.
        first_index: Where the first non-finite value is.
        true_value: The result in float64 at the worst place; None if it is not known.
        limit: The largest number of the output's dtype.
        derivative: In backward, the operation that ran, or "".
        called_from: Where `file` is of an installed package, the deepest line of the
            program that led there, such as "train.py:7: loss = model(x)"; else "".
        columns: Where in `code` the expression that called it begins and ends; None if
            that is not known, as on Python 3.10.
    """

    name: str
    file: str = ""
    line: int = 0
    code: str = ""
    stack: list[str] = field(default_factory=list)
    inputs: list[TensorSummary] = field(default_factory=list)
    outputs: list[TensorSummary] = field(default_factory=list)
    first_index: tuple[int, ...] | None = None
    true_value: float | None = None
    limit: float | None = None
    derivative: str = ""
    called_from: str = ""
    columns: tuple[int, int] | None = None

    @property
    def place(self) -> str:
        """Its file and line, such as "attention.py:46", or ""."""
        return f"{short_name(self.file)}:{self.line}" if self.file else ""


class Sample(int):
    """The index of a sample in the batch.

    Attributes:
        dataset: Its index in the dataset, where the batch holds one; else None.
        outlier: How much larger its values are than those of the other samples, in
            words, where that is a hundredfold; else "".
    """

    dataset: int | None = None
    outlier: str = ""

    @classmethod
    def of(cls, index: int, dataset: int | None = None, outlier: str = "") -> Sample:
        """Makes one of its index in the batch and that in the dataset."""
        sample = cls(index)
        sample.dataset, sample.outlier = dataset, outlier
        return sample


PHASES = ("forward", "backward", "optimizer", "data", "weights")
# Of gradients: what stands between backward and the optimizer is not run again.
NOT_REPLAYED = (
    "Code between backward and the optimizer's step (clipping, unscaling, "
    "communication) was not replayed."
)
SEEN_IN_BACKWARD = (
    "It arises in the forward, whose result is finite all the same; backward runs "
    "through it."
)
OVERWRITTEN = "The batch was written to in the step: the replay saw other data."
NOT_THE_LOSS = "The loss outside of the model was not replayed"
_MAX_LINES = 8
_MAX_CODE = 60
_SAME = 1e-3  # of gradients: more than float32 rounds in most networks
_FEW = 3


@dataclass(frozen=True)
class Artifact:
    """A file that an explanation leaves where evidence is kept.

    Attributes:
        name: The file's name.
        text: Its text; "" for a file of tensors.
        tensors: Its tensors, by name, on the CPU.
    """

    name: str
    text: str = ""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


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
        why: Why it was not tried; "" if it was.
        moved: By how much it changes the gradients of the other samples, run alone,
            relative to them (L2 norms over all parameters); None where that was not
            measured.
        losses: The loss of the other samples without it and with it, likewise.
        hides: The operation that overflows with it where the loss does not show it, as
            of a divisor, in words; "" where none was seen.
        distance: How far the output of a forward without backward is with it from one
            in float32, relative to that; None where that was not measured.
        is_near: Whether that is little enough for a remedy.
        modules: The modules that it runs in float32, by name; empty for another remedy.
        until: Those after which values are half precision again; see `keep_in_fp32`.
        file: The file of the line that it replaces, or "".
        line: The number of the first line that it replaces, or 0.
        last_line: That of the last one.
        parts: The changes that it is made of, where it is made of several, each with
            its own `file` and `line`. They belong together. Where `file` is "", they
            are in several files, or far from one another, or not all in a file.
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
    moved: float | None = None
    losses: tuple[float, float] | None = None
    hides: str = ""
    distance: float | None = None
    is_near: bool = True
    modules: tuple[str, ...] = ()
    until: tuple[str, ...] = ()

    @property
    def is_recommended(self) -> bool:
        """True if it was tried, and made the step finite, and no other output."""
        return self.tried and self.is_finite and self.is_near

    def __str__(self) -> str:
        """The remedy, where it belongs and what came of it, in one line."""
        if self.parts:
            codes = "; ".join(
                f"{part._prefix}{part.code or part.text}" for part in self.parts
            )
            return f"{self.text}: {codes} - {self.outcome}"
        code = f": {self.code}" if self.code else ""
        return f"{self._prefix}{self.text}{code} - {self.outcome}"

    @property
    def outcome(self) -> str:
        """The result of the trial, and what it costs the other samples."""
        if not self.tried:
            return "not tried"
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        clauses = [f"finite{loss}" if self.is_finite else "not finite"]
        if self.distance is not None:
            but = "" if self.is_near else "but "
            clauses[0] += f", {but}{100 * self.distance:.2g} % from float32"
        if self.moved is not None:
            clauses.append(self._moved_text())
        if self.hides:
            clauses.append(f"but {self.hides}")
        return "; ".join(clauses)

    @property
    def place(self) -> str:
        """The file and the lines that it changes, or "" where it changes none."""
        if self.parts:
            return " and ".join(filter(None, (part.place for part in self.parts)))
        lines = f"{self.line}-{self.last_line}"
        lines = lines if self.last_line > self.line else f"{self.line}"
        return f"{short_name(self.file)}:{lines}" if self.file else ""

    @property
    def changes_others(self) -> bool:
        """True if it was seen to change the other samples' loss or gradients."""
        return self._moves_loss or (self.moved is not None and self.moved > _SAME)

    @property
    def _moves_loss(self) -> bool:
        if self.losses is None:
            return False
        before, after = self.losses
        return abs(after - before) > _SAME * abs(before)

    def _moved_text(self) -> str:
        assert self.moved is not None
        if self._moves_loss and self.losses is not None:
            before, after = self.losses
            return f"the other samples' loss is {after:.4g} instead of {before:.4g}"
        if self.changes_others:
            change = f"{self.moved:.2g} of their norm"
            return f"the other samples' gradients change by {change}"
        return "the other samples stay as they are, within 0.1 %"

    @property
    def _prefix(self) -> str:
        return f"{self.place}: " if self.place else ""


@dataclass
class Explanation:
    """The findings of a replay of a non-finite step.

    Attributes:
        phase: Where the first bad value arose: "forward", "backward" or "optimizer", or
            where it already was: "data" or "weights". "" if that is not known. It is
            "backward", too, for one that the forward leaves out and backward meets.
        cause: Out of the table in `causes.py`.
        module: The name of the module whose code made it; "" for code outside modules.
        op: The operation that made it, or None if it is not known.
        tensor: The name of the bad weight, buffer or gradient, or the bad key of the
            batch; "" where there is none.
        sample: The sample of the batch that it comes from, or None.
        num_samples: How many samples the batch has; 0 if that is not known.
        chain: The operations from `op` to where the guard saw it.
        evidence: What was measured, in sentences.
        notes: What could not be found out, and why, in sentences.
        rank: The rank that found it, of several that replayed the step together; else
            None.
        num_ranks: How many ranks found the like.
        replays: How often the step's forward was run.
        seconds: The time that the explanation took.
        remedies: What was tried on this step, what made it finite first.
        artifacts: The files that it leaves, where evidence is kept.
        lost_by: Where the cause is "underflow" or "rounding", the operation before `op`
            whose result in its dtype has lost the value; else None.
    """

    phase: str = ""
    cause: str = UNKNOWN.name
    module: str = ""
    op: Op | None = None
    tensor: str = ""
    sample: Sample | None = None
    num_samples: int = 0
    chain: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rank: int | None = None
    num_ranks: int = 0
    replays: int = 0
    seconds: float = 0.0
    remedies: list[Remedy] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list, repr=False, compare=False)
    lost_by: Op | None = None

    @property
    def is_transient(self) -> bool:
        """True if the whole step was run again, and was finite then."""
        return self.cause == NOT_REPRODUCIBLE.name and NOT_REPLAYED not in self.notes

    @property
    def is_overflow(self) -> bool:
        """True if a number was too large for its dtype."""
        return Cause.of(self.cause).is_overflow

    @property
    def is_of_loss(self) -> bool:
        """True if the bad gradient came from the loss, which was not replayed."""
        return any(note.startswith(NOT_THE_LOSS) for note in self.notes)

    @property
    def names_maker(self) -> bool:
        """True if it is known what made the first bad value."""
        is_named = self.op is not None or bool(self.tensor)
        return is_named and Cause.of(self.cause).names_maker

    @property
    def artifact_bytes(self) -> int:
        """The bytes of its files' tensors."""
        return sum(t.nbytes for each in self.artifacts for t in each.tensors.values())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "artifacts": []}  # they stay on this rank

    def to_dict(self) -> dict[str, Any]:
        """The explanation as dicts, lists, texts and numbers, without the artifacts."""
        whole = replace(self, artifacts=[])
        sample = self.sample
        return {
            **{k: v for k, v in asdict(whole).items() if k != "artifacts"},
            "remedies": [
                {**asdict(each), "outcome": each.outcome} for each in self.remedies
            ],
            "sample": None if sample is None else int(sample),
            "dataset_index": None if sample is None else sample.dataset,
            "sample_outlier": "" if sample is None else sample.outlier,
        }

    def __str__(self) -> str:
        """The explanation in at most eight lines, the remedy at the end."""
        rows, remedies = [*self._rows()], [*self._remedy_rows()]
        rows = [*rows[: _MAX_LINES - len(remedies)], *remedies]
        return "\n".join(printable(f"{label:<9} {text}") for label, text in rows)

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "cause", f"{self._what()}{self._where()}"
        if self.op is not None and self.op.called_from:
            yield "your line", self.op.called_from
        for sentence in self.evidence[: 2 if self.remedies else _FEW]:
            yield "evidence", sentence
        if self.sample is not None:
            yield "sample", self._sample_text()
        if len(self.chain) > 1:
            yield "chain", _shortened(self.chain)
        for sentence in self.notes[:2]:
            yield "note", sentence
        if self.replays:
            seconds = f"{self.seconds:.2f} s"
            yield "replays", f"{counted(self.replays, 'forward')}, {seconds}"

    def _remedy_rows(self) -> Iterator[tuple[str, str]]:
        recommended = [each for each in self.remedies if each.is_recommended]
        failed = [e for e in self.remedies if e.tried and not e.is_recommended]
        if failed:
            yield "did not help:", "; ".join(dict.fromkeys(map(self._label, failed)))
        not_tried = [each for each in self.remedies if not each.tried]
        if not_tried and not recommended:
            labels = [f"{self._label(e)}{': ' * bool(e.why)}{e.why}" for e in not_tried]
            yield "not tried", "; ".join(dict.fromkeys(labels))
        for remedy in recommended[:2]:
            yield "tried", str(remedy)

    def _label(self, remedy: Remedy) -> str:
        """The text of a remedy, with what tells it from those with other results."""
        if remedy.is_finite and not remedy.is_near:
            return f"{remedy.text} ({remedy.outcome})"
        others = [
            each
            for each in self.remedies
            if each.text == remedy.text
            and (each.tried, each.is_finite) != (remedy.tried, remedy.is_finite)
        ]
        if not others:
            return remedy.text
        if any(each.place == remedy.place for each in others):
            return f"{remedy.text}: {remedy._prefix}{remedy.code or 'in words'}"
        parts = [part.place for each in others for part in each.parts]
        return f"{remedy.text} ({remedy.place}{' alone' * (remedy.place in parts)})"

    def _what(self) -> str:
        cause = self.cause
        if self.is_overflow and self.op is not None and self.op.outputs:
            cause += f" ({self.op.outputs[0].dtype})"
        in_phase = (
            f" in {self.phase}" if self.phase in ("backward", "optimizer") else ""
        )
        is_value = self.cause != SINGULAR_GRADIENT.name  # and no derivative
        if SEEN_IN_BACKWARD in self.notes and is_value:
            in_phase = " in the forward, seen in backward"
        return f"{cause}{in_phase}{self._on_rank()}"

    def _on_rank(self) -> str:
        if self.rank is None:
            return ""
        others = self.num_ranks - 1
        more = f" and {counted(others, 'other')}" if others > 0 else " alone"
        return f" on rank {self.rank}{more}"

    def _where(self) -> str:
        if self.op is None:
            names = [f"`{self.tensor}`"] if self.tensor else []
            names += [f"in {self.module}"] if self.module and not self.tensor else []
            return ": " + " ".join(names) if names else ""
        code = _part_of(self.op.code, self.op.columns or (0, 0))
        module = f" in {self.module}" if self.module else ""
        places = [self.op.place, f"{self.op.name}{module}"]
        where = f"({', '.join(filter(None, places))})"
        return f": {code}   {where}" if code else f" {where}"

    def _sample_text(self) -> str:
        assert self.sample is not None
        of = f" of {self.num_samples}" if self.num_samples else ""
        dataset = self.sample.dataset
        index = "" if dataset is None else f", index {dataset} of the dataset"
        outlier = f": {self.sample.outlier}" if self.sample.outlier else ""
        return f"{int(self.sample)}{of} (counted from 0){index}{outlier}"


# The exit status that tells a launcher what to do about an incident.


# Megatron-LM's rerun machine ends with these: 16 asks for a run on other hardware,
# which tells a faulty device from the data; 17 says that a result was not valid.
DETERMINISTIC, TRANSIENT, OTHERWISE = 16, 17, 1


def exit_code_of(explanation: Explanation | None, is_repeated: bool) -> int:
    """Chooses the exit status for an incident.

    Args:
        explanation: The findings of the replay, or None.
        is_repeated: An earlier run ended with the same step and place: a restart does
            not help, and no launcher must be told to try one more.

    Returns:
        16 if the replay gave it again, 17 if the whole step was replayed and finite,
        else 1.
    """
    if is_repeated or explanation is None:
        return OTHERWISE
    if explanation.is_transient:
        return TRANSIENT
    if explanation.cause == NOT_REPRODUCIBLE.name:
        return OTHERWISE  # code that was not replayed may have made it
    is_known = explanation.op is not None or bool(explanation.phase)
    return DETERMINISTIC if is_known else OTHERWISE


def _part_of(code: str, columns: tuple[int, int]) -> str:
    """A line, or the part of it that begins with an expression, if it is too long."""
    if len(code) <= _MAX_CODE:
        return code
    begin, end = columns
    if end > _MAX_CODE - 4 and begin:
        code = f"... {code[begin:]}"
    return code if len(code) <= _MAX_CODE else f"{code[: _MAX_CODE - 4]} ..."


def _shortened(chain: list[str]) -> str:
    if len(chain) > 2 * _FEW:
        chain = [*chain[:_FEW], "...", *chain[-_FEW:]]
    return " -> ".join(chain)
