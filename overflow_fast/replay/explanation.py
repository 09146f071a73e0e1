"""The answer to an alarm: which operation made the first bad value, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import _C
from ..core.modules import stepped_by
from ..text import counted, printable, short_name

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
CAUSES = (
    *("range overflow", "undefined", "singular gradient", "empty reduction"),
    *("underflow", "rounding", "gradient explosion", "bad setting"),
    *("bad data", "bad weights", "left-over gradients", "divergence"),
    *("not reproducible", "only in compiled code", "unknown"),
)
OVERFLOWS = ("range overflow", "gradient explosion")  # a number was too large
# Of gradients: what stands between backward and the optimizer is not run again.
NOT_REPLAYED = (
    "Code between backward and the optimizer's step (clipping, unscaling, "
    "communication) was not replayed."
)
USE_RUN = "guard.run(lambda: loss)"
NOT_THE_LOSS = "The loss outside of the model was not replayed"
OUTSIDE_LOSS = f"{NOT_THE_LOSS}: call it within `{USE_RUN}`."
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
            the second on have their indentation.
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

    @property
    def is_recommended(self) -> bool:
        """True if it was tried, and made the step finite."""
        return self.tried and self.is_finite

    def __str__(self) -> str:
        """The remedy, where it belongs and what came of it, in one line."""
        if self.parts:
            codes = "; ".join(f"{part._prefix}{part.code}" for part in self.parts)
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
        if self.moved is not None:
            clauses.append(self._moved_text())
        if self.hides:
            clauses.append(f"but {self.hides}")
        return "; ".join(clauses)

    @property
    def place(self) -> str:
        """The file and the line that it changes, or "" where it changes none."""
        if self.parts:
            return " and ".join(filter(None, (part.place for part in self.parts)))
        return f"{short_name(self.file)}:{self.line}" if self.file else ""

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


# Of runs that diverge: the step that is replayed comes after the one that did it.
SLOWER = Remedy(
    "lower the learning rate, warm it up, or clip gradients",
    tried=False,
    why="the weights before the last step are not held (a copy of the model)",
)


@dataclass
class Explanation:
    """The findings of a replay of a non-finite step.

    Attributes:
        phase: Where the first bad value arose: "forward", "backward" or "optimizer", or
            where it already was: "data" or "weights". "" if that is not known.
        cause: Out of `CAUSES`.
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
    cause: str = "unknown"
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
        return self.cause == "not reproducible" and NOT_REPLAYED not in self.notes

    @property
    def is_overflow(self) -> bool:
        """True if a number was too large for its dtype."""
        return self.cause in OVERFLOWS

    @property
    def is_of_loss(self) -> bool:
        """True if the bad gradient came from the loss, which was not replayed."""
        return any(note.startswith(NOT_THE_LOSS) for note in self.notes)

    @property
    def names_maker(self) -> bool:
        """True if it is known what made the first bad value."""
        is_vague = self.cause in ("unknown", "not reproducible")
        return not is_vague and (self.op is not None or bool(self.tensor))

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
        failed = [each for each in self.remedies if each.tried and not each.is_finite]
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
        others = [
            each
            for each in self.remedies
            if each.text == remedy.text
            and (each.tried, each.is_finite) != (remedy.tried, remedy.is_finite)
        ]
        if not others:
            return remedy.text
        if any(each.place == remedy.place for each in others):
            return f"{remedy.text}: {remedy._prefix}{remedy.code}"
        parts = [part.place for each in others for part in each.parts]
        return f"{remedy.text} ({remedy.place}{' alone' * (remedy.place in parts)})"

    def _what(self) -> str:
        cause = self.cause
        if self.is_overflow and self.op is not None and self.op.outputs:
            cause += f" ({self.op.outputs[0].dtype})"
        in_phase = (
            f" in {self.phase}" if self.phase in ("backward", "optimizer") else ""
        )
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
        code = self.op.code
        code = code if len(code) <= _MAX_CODE else f"{code[: _MAX_CODE - 4]} ..."
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


def _shortened(chain: list[str]) -> str:
    if len(chain) > 2 * _FEW:
        chain = [*chain[:_FEW], "...", *chain[-_FEW:]]
    return " -> ".join(chain)


# A step that is explained, as a guard saw it.


_NUMBERS = (float, int, tuple, list)


class _LastStep(NamedTuple):
    names: tuple[str, ...]
    settings: list[tuple[Any, ...]]
    versions: list[int]


def _names_of_numbers(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings to keep: what holds a model, or an optimizer, keeps it alive."""
    return tuple(k for k, v in group.items() if type(v) in _NUMBERS and k != "params")


class LastSteps:
    """The settings of optimizers' last steps, and the versions of weights after them.

    Both may have changed when a weight is found to be non-finite: a scheduler sets the
    next learning rate, and other code writes to weights.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, _LastStep] = WeakKeyDictionary()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes in a step that was made. Does not incur a CPU-GPU sync."""
        groups, versions = (
            optimizer.param_groups,
            _C.versions_of(stepped_by(optimizer)),
        )
        known = self._of.get(optimizer)
        names = known.names if known is not None else _names_of_numbers(groups[0])
        try:
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        except KeyError:  # others than the first step had
            names = tuple(
                set.intersection(*(set(_names_of_numbers(g)) for g in groups))
            )
            settings = [tuple(map(group.__getitem__, names)) for group in groups]
        self._of[optimizer] = _LastStep(names, settings, versions)

    def settings(
        self, optimizer: torch.optim.Optimizer, place: int
    ) -> Mapping[str, Any]:
        """The numbers among a group's settings in the last step, where it is known."""
        last = self._of.get(optimizer)
        if last is None or place >= len(last.settings):
            return {}
        pairs = zip(last.names, last.settings[place], strict=True)
        return {name: value for name, value in pairs if type(value) in _NUMBERS}

    def writes_since(
        self, optimizer: torch.optim.Optimizer, weight: torch.Tensor
    ) -> int:
        """The number of writes to a weight since, by its version; 0 if not known."""
        last, weights = self._of.get(optimizer), stepped_by(optimizer)
        if last is None or len(weights) != len(last.versions):
            return 0
        pairs = zip(weights, last.versions, strict=True)
        before = [version for each, version in pairs if each is weight]
        return max(0, _C.versions_of([weight])[0] - before[0]) if before else 0


@dataclass
class BadStep:
    """The step that is explained, as a guard saw it.

    Attributes:
        kind: Of the first bad entry: see `BadEntry.kind`; "" where nobody watched.
        module: The name of its module, or "".
        is_made: Whether that module is known to have made it.
        reaches_loss: Whether loss, outputs or gradients were bad.
        gradients: The bad gradients of parameters, by name.
        weights: The largest magnitudes of weights in the last steps, by name, where
            they were finite.
        steps_between: How many steps are between two of these magnitudes.
        largest_gradient: That of all gradients in the last step.
        optimizers: The optimizers.
        last_steps: Their last steps.
        num_dropped: How many forwards of the step were too many to be kept.
        hidden_by: Why forwards of the step could not be kept, or "".
        takes_from: See `Capture`.
        is_late: Whether the weights may have been stepped since.
        had_gradients: See `Capture`.
        left_over: See `Capture`.
        is_of_flag: Whether a device's overflow flag is all that was seen.
    """

    kind: str = ""
    module: str = ""
    is_made: bool = False
    reaches_loss: bool = True
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: Mapping[str, Sequence[float]] = field(default_factory=dict)
    steps_between: int = 1
    largest_gradient: float = 0.0
    optimizers: Sequence[torch.optim.Optimizer] = ()
    last_steps: LastSteps = field(default_factory=LastSteps)
    is_late: bool = False
    is_of_flag: bool = False
    num_dropped: int = 0
    hidden_by: str = ""
    takes_from: Sequence[str] = ()
    had_gradients: bool = False
    left_over: Mapping[str, int] = field(default_factory=dict)


# Sentences on what a finite replay leaves open.


def effects_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that what has these names was not put back."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return f"the step changes {first}, which could not be put back"


def taken_text(names: Sequence[str]) -> str:
    """Returns a sentence on a loss that takes from these, such as iterators."""
    listed = ", ".join(f"`{name}`" for name in names[:_FEW])
    return (
        f"A replay of it would take from {listed} again, or write to it: do that in a "
        f"line before, and call the rest within `{USE_RUN}`."
    )


def outside_text(name: str) -> str:
    """Returns, as a clause, that code outside of `guard.run()` computed a tensor."""
    return (
        f"`{name}` was computed outside of the function of `guard.run()`, by code that "
        "was not replayed with it: call the model within that function"
    )


def set_text(names: Sequence[str]) -> str:
    """Returns, as a clause, that the program set what has these names in the step."""
    first = ", ".join(f"`{name}`" for name in names[:_FEW])
    return (
        f"the program set {first} in the step, outside of the models' forwards, and a "
        "replay runs with what was there before (set it within the function of "
        "`guard.run()`)"
    )


SOME = "Some replays are finite, but {}."
NOT_REDUCED = (
    "Each rank's own gradients are finite in the replay; what ranks make of them "
    "together (DDP's reduction, communication hooks) was not replayed."
)
LEFT_OVER = (
    "left over from step {}: non-finite since then, and not cleared before this step"
)
OLD = (
    "The replay is finite. Gradients were there before the step's first forward, and "
    "may have been non-finite: clear them where a step is skipped, too."
)
NOT_CALLED = (
    "The replayed backward is finite. Hooks of `register_post_accumulate_grad_hook` "
    "were not called in it, and may have made the gradients non-finite."
)
MASKED = "An output holds -inf alone: it may be an intended mask."
NO_LOSS = (
    "The forward is finite. Backward was not run: neither `loss` nor the model "
    "returned a number that requires a gradient."
)
GIVEN_BAD = "The gradient that the model's output was given is non-finite."
_ALL_BAD = (
    "All gradients are non-finite, and the replayed backward is finite: code between "
    "it and the optimizer's step (clipping, unscaling, communication) may have made "
    "them."
)
ALL_BAD = f"{_ALL_BAD} It was not replayed."
NOT_BEHIND = f"{_ALL_BAD} Lines of it were run again, which do not explain them."
OTHER_WEIGHT = (
    "The weight is finite in the model, and so is the replay: it was written to since, "
    "or the forward ran with another tensor in its place, as under functional_call()."
)
STOOD_IN = (
    "The replay is finite. It ran with the model's own weights: the step ran under "
    "functional_call(), whose tensors were not kept. Use `guard.run(lambda: loss)`."
)
