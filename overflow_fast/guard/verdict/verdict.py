"""The verdict on a step: its first bad entry, and where the value began."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...base.types import TensorPath, ValueCounts
from .entry_headroom import EntryHeadroom

SOURCES = (
    *("module", "caller", "loss", "batch", "weight", "buffer", "optimizer_state"),
    *("after_backward", "update", "unclear"),
)


class NonModuleOrigin(str):
    """A candidate of `Origin.candidates` that is no module."""


BATCH = NonModuleOrigin("the batch")
LOSS = NonModuleOrigin("the loss")
CODE = NonModuleOrigin("code in the step")
STAND_IN = NonModuleOrigin("a tensor in the place of a weight")


@dataclass(frozen=True)
class Origin:
    """Where the `first` bad value of a verdict began.

    Attributes:
        how: "made" by the module of `first`; "passed_on" by it, made before;
            "given", where the model's own inputs or weights were bad; "unclear".
        source: The kind of its first maker or holder, where known, out of `SOURCES`:
            "module" (the code of one module's call), "caller" (a module's own code
            between the calls of its submodules), "loss" (code after the model),
            "batch" (the batch that a trainer took from its loader),
            "weight", "buffer" and "optimizer_state" (non-finite before the step),
            "after_backward" (gradients were changed between backward and the
            optimizer's step), "update" (the optimizer's step made it of finite
            gradients), or "unclear".
        maker: The maker in words; the qualified name where it is a module.
        candidates: The possible makers where these are few, else empty (as for a
            gradient that any code behind a module may have made): qualified names of
            modules (their code), weights and buffers, "the model", "the loss" (code
            after the model), "the batch" (which includes labels), "the training loop"
            (Lightning: "training_step"; without an optimizer "the program"), "code in
            the step", or "a tensor of functional_call()".
        after: The module whose call, or the gradient of whose output, was the last one
            seen before it where that is of use, or "".
        unwatched: What the guard does not watch within the maker: modules, hooks, and
            parts of what modules are given or return.
        batch_places: Its places in the batch, or in other inputs that the training loop
            gave the model, such as "`input.labels`, sample 3 of 8".
        nonfinite_state: The weights, buffers and attributes of modules that were
            non-finite too, and that the code may have read, where that is not certain.
        stale_inputs: The inputs of the first bad call that were scanned before it and
            not again, as on devices, or that were finite then and are not now: a write
            that torch does not count may have come between.
        remarks: Further observations that may explain it, in sentences.
    """

    how: str = ""
    source: str = ""
    maker: str = ""
    candidates: list[str] = field(default_factory=list)
    after: str = ""
    unwatched: list[str] = field(default_factory=list)
    batch_places: list[str] = field(default_factory=list)
    nonfinite_state: list[str] = field(default_factory=list)
    stale_inputs: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BadEntry(ValueCounts):
    """A tensor that holds a nan or an inf.

    Attributes:
        kind: "input", "output", "grad_output", "weight", "buffer", "gradient",
            "optimizer_state", "state" for what `run()` has written to a module that is
            not watched, "recorded" for a loss or what `record()` was given, "tensor"
            for one of a state dict or a saved checkpoint, or "value" for what a replay
            alone has seen, where the program has raised.
        fqn: The qualified name of the module; of the tensor itself where it belongs to
            no call.
        class_name: The module's class, or "".
        label: The entry of the call, such as `output[0]`, or the tensor's name.
        is_finite_now: True for a weight that is finite: another tensor stood in for it
            in the call, as in `functional_call()`, or it has changed since.
        not_scanned: Why its values are not known, where it could not be scanned; or "".
    """

    kind: str
    fqn: str
    class_name: str
    label: str
    is_finite_now: bool = False
    not_scanned: str = ""

    @property
    def place(self) -> str:
        """The name of its module, or of the tensor; or "the model"."""
        return self.fqn or "the model"

    @property
    def path(self) -> TensorPath:
        """Where the tensor is."""
        if self.class_name:
            return TensorPath.from_label(self.fqn, self.kind, self.label)
        return TensorPath.from_fqn(self.kind, self.fqn)


@dataclass(frozen=True)
class Verdict:
    """The findings of a step.

    Attributes:
        batch: The forward that the first bad frame belongs to, counted from 0.
        first: The first bad entry in execution order; None if the step is clean.
        origin: Where the value began.
        masks: The inputs of the first bad call that hold -inf and nothing worse; that
            is no alarm, since additive masks are made of it.
        allowed: Those that hold what a rule allows; see `allow` of `OverflowGuard`.
        headroom: The same entry's largest magnitude when it was last finite.
        num_bad_frames: How many calls, gradients and lists of tensors are bad.
        dirty_gradients: The parameters whose gradients are bad, in the model's order.
        clean_gradients: The nearest parameters around those whose gradients are clean.
        is_recomputed: True if it was finite in the forward, and bad when backward
            computed that again.
        reaches_loss: True if the loss, or any output of the model, is bad.
    """

    batch: int = 0
    first: BadEntry | None = None
    origin: Origin = field(
        default_factory=Origin,
        metadata={"flat": {"how": "origin"}},  # in files; see `to_dict()`
    )
    masks: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    headroom: EntryHeadroom | None = None
    num_bad_frames: int = 0
    dirty_gradients: list[str] = field(default_factory=list)
    clean_gradients: list[str] = field(default_factory=list)
    is_recomputed: bool = False
    reaches_loss: bool = False

    @property
    def is_clean(self) -> bool:
        """True if nothing bad was found."""
        return self.first is None

    def with_remarks(self, remarks: list[str]) -> Verdict:
        """Returns the verdict with other remarks on its origin."""
        return replace(self, origin=replace(self.origin, remarks=remarks))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a dict, those of its origin among its own."""
        found = dict[str, Any]()
        for name, value in asdict(self).items():
            if name == "origin":
                found |= {name: value.pop("how"), **value}
            else:
                found[name] = value
        return found


def is_unseen(verdict: Verdict) -> bool:
    """True if nothing is known to be bad, and a tensor that matters was not scanned."""
    return verdict.first is not None and bool(verdict.first.not_scanned)
