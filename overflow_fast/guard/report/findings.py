"""The data of an explanation: what a replay of a bad step has found."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .causes import NOT_REPRODUCIBLE, UNKNOWN, Cause
from .op import Op, Sample
from .remedy import Remedy

# Of gradients, where not all that stands between backward and the optimizer's step was
# run again.
NOT_REPLAYED = (
    "Code between backward and the optimizer's step (clipping, unscaling, "
    "communication) was not replayed."
)
PARTLY_REPLAYED = (
    "Of the code between backward and the optimizer's step (clipping, unscaling, "
    "communication) the program's own lines were replayed, which do not explain it."
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
OF_OTHERS = (
    "Mend the code that writes there: `guard.check()` behind it judges what it has "
    "written."
)
OVERWRITTEN = "The batch was written to in the step: the replay saw other data."
NOT_REDUCED = (
    "Each rank's own gradients are finite in the replay; what ranks make of them "
    "together (DDP's reduction, communication hooks) was not replayed."
)
IN_LOOP = (
    "Code between the calls was not replayed. Call all of it within "
    "`guard.run(lambda: loss)`."
)
BETWEEN_FORWARDS = (
    "Code between the forwards was not replayed. Call all of it within "
    "`guard.run(lambda: ...)`."
)
FOLLOWS = "is the nan that follows"
OF_MASK = "its infs come from the -inf that "
NOT_THE_LOSS = "The loss outside of the model was not replayed"


@dataclass(frozen=True)
class Artifact:
    """A file that an explanation leaves where evidence is kept.

    Attributes:
        name: The file's name.
        content: What `torch.save` writes: tensors on the CPU, containers, plain values.
        num_bytes: How many bytes its tensors have.
    """

    name: str
    content: dict[str, Any]
    num_bytes: int


@dataclass(repr=False)
class Findings:
    """The fields of an `Explanation`, whose docstring says what each is."""

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
    news: str = ""
    advice: str = ""
    forward: tuple[int, int] | None = None

    @property
    def stated(self) -> str:
        """The sentence whose first clause the first line has; "" where fields say all.

        It is the reason. Without one it is the first note where the cause is not known,
        and the first sentence of the evidence where no operation is.
        """
        is_open = self.cause == UNKNOWN.name
        said = self.evidence if is_open or self.op is None else []
        texts = [self.reason, *(self.notes if is_open else []), *said]
        return next(filter(None, texts), "")

    @property
    def becomes_nan(self) -> list[str]:
        """The sentence of the evidence on what made nan of its infs, or none."""
        return [each for each in self.evidence if FOLLOWS in each][:1]

    @property
    def passes_infs(self) -> bool:
        """True if the operation has returned infs of a mask that it was given."""
        return self.reason.startswith(OF_MASK)

    @property
    def nearest(self) -> Remedy | None:
        """The change that comes nearest, where none keeps the value.

        Of those that have code to write, if there is one: others change a library. Of
        equally near ones float64 is the last.
        """
        own = [each for each in self.remedies if not each.is_of_data]
        if any(each.is_recommended for each in own):
            return None
        left = [each for each in own if each.keeps_running]

        def rank(remedy: Remedy) -> tuple[bool, float, bool]:
            return not remedy.code, float(f"{remedy.off:.1g}"), remedy.in_float64

        return min(left, key=rank, default=None)

    @property
    def is_transient(self) -> bool:
        """True if the whole step was run again, and was finite then."""
        is_part = not {NOT_REPLAYED, PARTLY_REPLAYED}.isdisjoint(self.notes)
        return self.cause == NOT_REPRODUCIBLE.name and not is_part

    @property
    def is_finite(self) -> bool:
        """True if the step was run, and is finite; a note says if backward was not run.

        Only `explain()` says so: it runs a step that nobody has seen to be bad.
        """
        return not self.cause

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
    def is_of_loss(self) -> bool:
        """True if the bad gradient came from the loss, which was not replayed."""
        return any(note.startswith(NOT_THE_LOSS) for note in self.notes)

    @property
    def names_maker(self) -> bool:
        """True if it is known what made the first bad value."""
        is_named = self.op is not None or bool(self.tensor)
        is_unwritten = self.cause == NOT_REPRODUCIBLE.name and self.op is not None
        return is_unwritten or (is_named and Cause.of(self.cause).names_maker)

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
