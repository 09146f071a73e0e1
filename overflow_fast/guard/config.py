"""The configuration of a guard: documented, checked and held in one place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..core.selection import Wanted
from ..report.report import Report
from ..verdict.rules import Allow, Rules
from .arguments import (
    check_choices,
    check_group,
    check_names,
    check_numbers,
    check_path,
    check_paths,
    check_ranges,
    check_safetensors,
    check_watch,
    reusable,
)
from .metrics import exporters_of
from .policy import plain_action

Policy = str | Callable[[Report], str]
Path = str | os.PathLike[str]
EVERYTHING = tuple(name for name in Wanted._fields if name != "optimizer_state")
TRIPWIRE = "tripwire"
WEIGHTS_EVERY = 64  # steps between the tripwire's scans of the weights
NORM = "grad_norm"  # what `record()` calls the norm of all gradients

_ITERABLES = (
    *("watch", "include", "exclude", "ranges", "allow", "metrics"),
    "checkpoints",
)


@dataclass(frozen=True)
class GuardConfig:
    """The arguments of an `OverflowGuard` besides its models and optimizers.

    Attributes:
        on_overflow: The action for a bad step. "raise": raise `NonFiniteError`. "warn":
            log a warning (logger `overflow_fast`). "skip": leave the optimizer's step
            out, so that weights and state keep every bit, and log a warning. Or a
            callable that takes the `Report` and returns one of these; anything else
            that it returns raises TypeError or ValueError.
        watch: "tripwire", for production: check the loss and the gradients of the
            parameters alone, with no hook but on the model; a bad step is run again
            with everything watched, for the report. Where `record(grad_norm=...)` gives
            the norm of all gradients, that number stands for the gradients as they are
            then; those that a later backward or write changes are checked. Values that
            do not reach loss or gradients are not seen, and there is no headroom. Or
            the kinds of tensors to check: any of "activations", "grad_outputs"
            (gradients of outputs; needs "activations"), "gradients" (of parameters),
            "weights", "buffers", "loss" and "optimizer_state"; by default all but the
            last.
        include: Patterns of names of the modules to check, such as `["h.*.mlp*"]`; None
            for all. In a dict of models `"gen.0"` names module `0` of model "gen", in a
            list `"1.0"` module `0` of the second.
        exclude: Patterns of names of modules to leave out.
        every: Watch one step in this many. In between, no module has a hook; in a
            process with compiled code the hooks stay, and do nothing.
        warmup: The number of first steps that are not watched.
        ranges: Watch only steps in one of these half-open ranges.
        budget: The share of a step's time that the guard may take on average, such as
            0.01. The guard measures itself, checks gradients in every step if they fit
            the budget, everything else as often as the rest allows, and everything
            after a bad step. If they do not fit, steps are left out, to which
            `on_overflow` does not apply: one line warns of that, unless it is "warn".
        sync: "step", or "lagged": the verdict on tensors on a device arrives one step
            later, and the host waits only where it is a whole step ahead. Optimizers
            whose kernels read `found_inf` (fused Adam, AdamW, SGD, Adagrad) skip a bad
            step on the device all the same, with "skip" and "raise"; with others,
            "skip" and a callable incur the sync of "step".
        max_consecutive_skips: Raise after more than this many skipped steps in a row.
        max_frames: The number of frames before the bad one that a report shows.
        memo: Scan a tensor that was not written to only once in a forward; see
            `DebugUnderflowOverflow`.
        evidence: A folder for the report, offending tensors and batch of bad steps, in
            `overflow_fast/RUN/step-N/`; runs and ranks may share it. On a device,
            activations are gone when the step is judged; gradients, weights and the
            batch are there. Holds each batch until it is judged.
        evidence_mib: The MiB of tensors that a step may leave.
        evidence_keep: The number of steps of this run whose evidence is kept. Files
            that were added or changed, and those of other runs, are never removed.
        log: A file for one line of JSON for each judged step, after a header for each
            run.
        log_mib: The MiB that the file may have before a new one is begun.
        log_keep: The number of older files to keep; 0: no new one is begun.
        collect: The ranks that write log and flight record: "all", a file each; "node",
            the first of each host (`LOCAL_RANK` 0); or "rank0". Tensors of a bad step
            are written by the rank that found it alone, whatever this is.
        record: A file for the flight record: magnitudes and counts of each entry in
            each watched step, for `overflow_fast.read_record()`. A file that is there
            already is left alone: this run's is `run.2.ofr` then.
        record_mib: The MiB that the record may have; older steps are folded together.
        record_steps: The number of last steps that keep a line of their own, where a
            quarter of the file has room for them.
        process_group: The ranks that decide together, a `ProcessGroup` or a
            `DeviceMesh`: each judged step they join one all-reduce of 64 bytes, and all
            act on the report of the rank that found the bad value first. None: all
            ranks that the process groups of DDP, FSDP, `replicate()`, DTensors and
            ZeroRedundancyOptimizer connect, unless the policy is to warn; a line is
            logged if these are not all ranks. False: each rank decides for itself. With
            a group, every rank has to have its guard, and call `check()` where one
            does.
        allow: Intended non-finite values, such as
            `{"*.attn:input[attn_mask]": "-inf", "router:output[1]": "inf"}`: a pattern
            of module names, a colon, and a pattern of that module's entries:
            `input...`, `output...`, `grad_output...`, `weight.NAME`, `buffer.NAME`,
            `gradient.NAME`, `optimizer_state.NAME...`, or `recorded.NAME` (with no
            module). `[x]`, `['x']` and `.x` are the same. The values are "-inf",
            "+inf", "inf" for both, "nan", or a list of these; any other there is still
            an alarm. See `learn()`. -inf in inputs and buffers needs no rule.
        headroom_bits: Log a warning when an output of a module, a weight or a gradient
            could double fewer than this many times in its dtype (1.0: it exceeds half
            of the largest number), and again each time the remaining headroom has
            halved. Gradients that a GradScaler scales are left out. None for never.
        on_spike: The action for a step that is finite and whose loss, or norm of all
            gradients, is far above its last 200 values. "warn": log a warning and mark
            the step in log and record. "skip": leave its optimizer step out too, at
            most three in a row. None: do not look. The loss is what the model returns
            or `record(loss=...)` gives; the norm is what `record(grad_norm=...)` gives,
            else the largest magnitude of a gradient (not with a GradScaler). Not with
            `sync="lagged"`.
        underflow_every: Count the zeros and subnormals of all these in one of this many
            watched steps, for `headroom()` and `metrics()`. That takes torch operations
            and temporaries of each tensor's size. None for never.
        saturation: Log a warning if this share of the values of an output, weight or
            gradient in float16 or float8 equals the dtype's largest number, where casts
            may have cut them off; counted in the step after one in which a value stood
            there. None for never.
        metrics: Exporters that receive numbers after each watched step: a callable that
            takes the step and a dict, such as
            `overflow_fast.integrations.tensorboard.TensorBoardMetrics()`, or several.
        explain: Run a bad step again to name the operation that created the first bad
            value, and the cause (`Report.explanation`). "auto": always where the run
            ends; else the first time for each place, at most once in 100 steps. Keeps
            references to each batch until its step is judged. Not with `sync="lagged"`.
        explain_budget: The number of forwards that may find the cause, as many that try
            remedies, and as many more that add a change to one; None for 8.
        replay_safe: False: the forward has effects outside of modules that must not
            happen twice, such as taking data from a loader. Nothing is run again then;
            explanations say what is known without.
        checkpoints: Files of weights (`torch.save`, safetensors), the newest last. If
            weights are bad, the step is tried with those that are finite.
        ops_every: Run one clean step in this many again, and log the operations whose
            non-finite values were masked, clamped or divided away. Not with several
            ranks. None for never.
        audit: In one step of this many compute one layer again, a different one each
            time, and compare the bits: silent data corruption. None for never.
        check_replicas: After one step in this many compare the replicas of weights and
            optimizer states under DDP and HSDP, bit for bit: an all-gather of 8 bytes,
            which every rank has to join. None for never.
    """

    on_overflow: Policy
    watch: Iterable[str] | Literal["tripwire"]
    include: Sequence[str] | None
    exclude: Sequence[str]
    every: int
    warmup: int
    ranges: Sequence[tuple[int, int]] | None
    budget: float | None
    sync: Literal["step", "lagged"]
    max_consecutive_skips: int
    max_frames: int
    memo: bool
    evidence: Path | None
    evidence_mib: float
    evidence_keep: int
    log: Path | None
    log_mib: float
    log_keep: int
    collect: Literal["rank0", "node", "all"]
    record: Path | None
    record_mib: float
    record_steps: int
    process_group: Any
    allow: Allow
    headroom_bits: float | None
    on_spike: Literal["warn", "skip"] | None
    underflow_every: int | None
    saturation: float | None
    metrics: Any
    explain: bool | Literal["auto"]
    explain_budget: int | None
    replay_safe: bool
    checkpoints: Sequence[Path]
    ops_every: int | None
    audit: int | None
    check_replicas: int | None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GuardConfig:
        """Takes the fields out of a guard's arguments, by name.

        Raises:
            TypeError, ValueError: If one of them cannot be used.
            ImportError: If `evidence` is given and safetensors is not installed.
        """
        given = {field.name: arguments[field.name] for field in fields(cls)}
        for name in _ITERABLES:
            given[name] = reusable(given[name])
        given["on_overflow"] = plain_action(given["on_overflow"])
        given["allow"] = {} if given["allow"] is None else given["allow"]
        return cls(**given)

    def __post_init__(self) -> None:
        """Checks the fields."""
        check_choices(self)
        if not self.is_tripwire:
            check_watch(self.watch)
        check_numbers(self)
        for name in ("evidence", "log", "record"):
            check_path(name, getattr(self, name))
        check_paths("checkpoints", self.checkpoints)
        check_ranges(self.ranges)
        check_names("include", self.include, optional=True)
        check_names("exclude", self.exclude)
        exporters_of(self.metrics)
        Rules(self.allow)
        if self.evidence is not None:
            check_safetensors()
        check_group(self.process_group)

    @property
    def wanted(self) -> Wanted:
        """The kinds of tensors to check, as flags."""
        kinds = ("loss", "gradients") if self.is_tripwire else self.watch
        return Wanted(**dict.fromkeys(kinds, True))

    @property
    def is_tripwire(self) -> bool:
        """True if modules are watched only when a bad step is run again."""
        return self.watch == TRIPWIRE

    @property
    def weights_every(self) -> int | None:
        """In one step of how many weights are scanned that are not watched."""
        return WEIGHTS_EVERY if self.is_tripwire else None

    @property
    def may_skip(self) -> bool:
        """True if the policy may skip a step."""
        return "skip" in (self.on_overflow, self.on_spike) or callable(self.on_overflow)

    @property
    def may_act(self) -> bool:
        """True if the policy may do more than warn."""
        return self.on_overflow != "warn" or self.on_spike == "skip"
