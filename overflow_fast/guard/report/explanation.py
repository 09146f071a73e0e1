"""The answer to an alarm: which operation made the first bad value, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ...scanner.text import nonfinite_text, rounded, short_name
from .causes import NOT_REPRODUCIBLE, UNKNOWN, Cause

if TYPE_CHECKING:
    from .answer import ExplanationText

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
        operands: The numbers that an elementwise operation was given at `first_index`.
        outside: Which input is outside of the operation's domain, and where, in words.
        value: Its own result where float64 has `true_value`; None if it is not finite
            or not known.
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
    operands: list[float] = field(default_factory=list)
    outside: str = ""
    value: float | None = None

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
OWN_LINES = (
    "The program's own lines of the loss, up to {}, were run again, too, since it lies "
    "outside of the models."
)
BEHIND_BACKWARD = (
    "The program's own lines between backward and the optimizer's step were run again, "
    "too: the gradients are finite before them and non-finite behind them."
)
REPLACED = (
    "Mend the code that puts the parameter there: a checkpoint from before it holds "
    "the one that was replaced."
)
OVERWRITTEN = "The batch was written to in the step: the replay saw other data."
NOT_REDUCED = (
    "Each rank's own gradients are finite in the replay; what ranks make of them "
    "together (DDP's reduction, communication hooks) was not replayed."
)
NOT_THE_LOSS = "The loss outside of the model was not replayed"
SAME = 1e-3  # of gradients: more than float32 rounds in most networks
_MOST_MOVED = 1e6  # a change of results is written up to here
_TIMES = 10.0  # an error is written as a factor from here on
_FAR = 0.1  # of the true loss: what misses it by more keeps no value; chosen


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
        moved: By how much it changes the gradients of the last clean step's batch, or
            of this one with `stand_in` in place of the sample that fails, relative to
            them (L2 norms over all parameters), with the same weights and dropout
            masks; None where that was not measured.
        losses: The loss of that batch without it and with it.
        is_of_clean: Whether that is the batch of the last clean step.
        stand_in: The sample that was put in place of the one that fails, or None.
        true_loss: The loss in float64, or where the failing call has no value there,
            of an exact form in float64; None where it is not known.
        error: How far the loss is from that, relative to it; where the loss is right,
            and gradients are not, how far these are (L2 norm). None where the true
            loss is beyond the dtype's maximum, which no remedy comes to.
        misses: "loss" or "gradients", where that is more than rounding explains.
        usual: The largest loss of the steps before, where this one is 1e5 times as
            large and not known to be right; else None. Then it is no remedy.
        breaks: What becomes non-finite in the optimizer's step with it, or the gradient
            that is 1e5 times as large as the largest seen last and not known to be
            right, in words; "" for nothing that was seen. Else it is no remedy.
        leaves: The buffer that is a thousand times as large after the step with it, as
            the statistics of a batch norm, in words; or "".
        moves_results: The largest change of those results of the changed calls that
            were finite without it, relative to the largest of them; None where there
            were none, they were 0, or it is the same in exact arithmetic.
        is_flat: Whether all gradients are 0 with it.
        stops_gradient: Whether no gradient goes through where it acts.
        is_of_data: Whether it changes the batch, and no code.
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
    is_of_clean: bool = False
    stand_in: int | None = None
    true_loss: float | None = None
    error: float | None = None
    misses: str = ""
    usual: float | None = None
    breaks: str = ""
    leaves: str = ""
    moves_results: float | None = None
    is_flat: bool = False
    stops_gradient: bool = False
    is_of_data: bool = False
    hides: str = ""
    distance: float | None = None
    is_near: bool = True
    modules: tuple[str, ...] = ()
    until: tuple[str, ...] = ()

    @property
    def is_recommended(self) -> bool:
        """True if it was tried, made the step finite, is near and breaks nothing."""
        return self.keeps_running and not self.is_far

    @property
    def keeps_running(self) -> bool:
        """True if it is recommended, but for how far its loss is off the true one."""
        return self.tried and self.is_finite and self.is_near and not self._breaks_run

    @property
    def off(self) -> float:
        """The distance of its loss from the true one; inf where one is not known."""
        if self.loss is None or self.true_loss is None:
            return float("inf")
        return abs(self.loss - self.true_loss)

    @property
    def is_far(self) -> bool:
        """True if its loss misses the true one by more than a tenth."""
        is_off = self.error is None or self.error > _FAR
        return self.misses == "loss" and is_off

    @property
    def is_right(self) -> bool:
        """True if it is recommended, and hides and misses nothing, as far as known."""
        return self.is_recommended and not self.hides and not self.misses

    @property
    def harm(self) -> str:
        """The reason why it is no remedy though the step is finite with it, or ""."""
        far = self._error_text().strip(", ()") if self.is_far else ""
        return self._breaks_run or (far and f"a loss of {self.loss:.3g}: {far}")

    @property
    def _breaks_run(self) -> str:
        if self.usual is not None and self.loss is not None:
            return f"a loss of {self.loss:.3g} after at most {self.usual:.3g}"
        return self.breaks

    def __str__(self) -> str:
        """The remedy and what came of it, and the code below it."""
        from .answer import remedy_text

        return remedy_text(self)

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
        loss += self._error_text()
        clauses = [f"finite{loss}" if self.is_finite else "not finite"]
        if self._breaks_run:
            clauses.append(f"but {self._breaks_run}")
        if self.distance is not None:
            but = "" if self.is_near else "but "
            clauses[0] += f", {but}{rounded(100 * self.distance, 2)} % from float32"
        if self.moved is not None:
            clauses.append(self._moved_text())
        elif self.moves_results is not None and self.moves_results > SAME:
            by = f"{min(self.moves_results, _MOST_MOVED):.2g} of the largest"
            clauses.append(f"changes results that were finite by up to {by}")
        if self.is_flat:
            clauses.append("all gradients are 0")
        elif self.stops_gradient:
            clauses.append("no gradient where it acts")
        for each in filter(None, (self.leaves, self.hides)):
            clauses.append(f"but {each}")
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
        """True if it was seen to change loss or gradients where nothing fails."""
        return self._moves_loss or (self.moved is not None and self.moved > SAME)

    @property
    def _moves_loss(self) -> bool:
        if self.losses is None:
            return False
        before, after = self.losses
        return abs(after - before) > SAME * abs(before)

    def _error_text(self) -> str:
        if not self.misses or self.true_loss is None or self.loss is None:
            return ""
        size = abs(self.true_loss)
        is_small = self.error is not None and self.error * size < self.off / 2
        if self.error is None or (is_small and self.misses == "loss"):
            return f" (the true one is {self.true_loss:.3g})"
        by = f"{self.error:.2g} times" if self.error >= _TIMES else f"{self.error:.0%}"
        if self.misses == "gradients":
            return f", gradients {by} off the true ones"
        return f", {by} off the true {self.true_loss:.4g}"

    def _moved_text(self) -> str:
        assert self.moved is not None
        clean = "the last clean batch" if self.is_of_clean else ""
        if self._moves_loss and self.losses is not None:
            before, after = self.losses
            change = f"the loss is {after:.4g} instead of {before:.4g}"
            if clean:
                return f"with {clean} {change}"
            if self.stand_in is None:
                return f"{change} without this sample"
            return f"with sample {self.stand_in} in place of this one {change}"
        if self.changes_others:
            whose = f"{clean}'s" if clean else "the other samples'"
            return f"{whose} gradients change by {self.moved:.2g} of their norm"
        stay = (
            f"{clean} stays as it is" if clean else "the other samples stay as they are"
        )
        return f"{stay}, within 0.1 %"


@dataclass(repr=False)
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
        reason: Why it is so in a clause, where the fields do not tell.
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
    reason: str = ""

    @property
    def nearest(self) -> Remedy | None:
        """The change that comes nearest, where none keeps the value.

        Of those that have code to write, if there is one: others change a library.
        """
        own = [each for each in self.remedies if not each.is_of_data]
        if any(each.is_recommended for each in own):
            return None
        left = [each for each in own if each.keeps_running]
        return min(left, key=lambda each: (not each.code, each.off), default=None)

    @property
    def is_transient(self) -> bool:
        """True if the whole step was run again, and was finite then."""
        return self.cause == NOT_REPRODUCIBLE.name and NOT_REPLAYED not in self.notes

    @property
    def is_overflow(self) -> bool:
        """True if a number was too large for its dtype."""
        return Cause.of(self.cause).is_overflow

    @property
    def is_seen_in_backward(self) -> bool:
        """True if the forward leaves the value out, and backward runs through it."""
        return SEEN_IN_BACKWARD in self.notes

    @property
    def is_behind_backward(self) -> bool:
        """True if code between backward and the optimizer's step made the value."""
        return BEHIND_BACKWARD in self.notes

    @property
    def other_notes(self) -> list[str]:
        """The notes, but for what the first line tells, and what was run again."""
        begin = OWN_LINES.partition("{")[0]
        others = (each for each in self.notes if each != SEEN_IN_BACKWARD)
        return [each for each in others if not each.startswith(begin)]

    @property
    def is_of_loss(self) -> bool:
        """True if the bad gradient came from the loss, which was not replayed."""
        return any(note.startswith(NOT_THE_LOSS) for note in self.notes)

    @property
    def names_maker(self) -> bool:
        """True if it is known what made the first bad value."""
        is_named = self.op is not None or bool(self.tensor)
        is_unwritten = self.cause == NOT_REPRODUCIBLE.name and self.op is not None
        return is_unwritten or (is_named and Cause.of(self.cause).names_maker)

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
                {**asdict(e), "outcome": e.outcome, "is_recommended": e.is_recommended}
                for e in self.remedies
            ],
            "sample": None if sample is None else int(sample),
            "dataset_index": None if sample is None else sample.dataset,
            "sample_outlier": "" if sample is None else sample.outlier,
        }

    def __str__(self) -> str:
        """The answer in a line, and what it rests on, the remedies last."""
        return self.words.text()

    __repr__ = __str__  # in a console, too

    @property
    def words(self) -> ExplanationText:
        """Its sentences."""
        from .answer import ExplanationText

        return ExplanationText(self)


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
