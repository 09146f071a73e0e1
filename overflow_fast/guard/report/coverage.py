"""The coverage of a guard, in numbers and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ... import _C
from ...base.text import counted, printable
from ...detector.coverage import Coverage, coverage_of
from ...detector.selection import Wanted
from ..watching.watch import ModelWatch

_OF_FORWARDS = ("activations", "weights", "buffers")  # that a forward alone has


@dataclass(frozen=True)
class GuardCoverage(Coverage):
    """The tensors and steps that a guard's clean verdicts cover, and the gaps.

    It has the attributes of `Coverage`, too.

    Attributes:
        modules: How many modules the models have.
        modules_watched: How many of them are watched.
        steps: How many steps there were.
        steps_watched: How many of them were checked, in whatever detail.
        without_gradient: How many parameters had no gradient in the last watched step.
        not_watched: The kinds of tensors that `watch` leaves out.
        has_seen_loss: True if a loss was among the outputs, or recorded.
        failures: How often the guard itself failed, so that something was not judged.
        rules_unused: The rules of `allow` that nothing has matched yet.
        ignores_spikes: True if spikes were asked for, and cannot be looked for.
        requests: How many requests there were: forwards without autograd, outside of
            which there was no step.
        unused_kernels: The devices whose tensors torch operations scan although there
            are kernels, with the reason.
    """

    modules: int
    modules_watched: int
    steps: int
    steps_watched: int
    without_gradient: int
    not_watched: list[str]
    has_seen_loss: bool
    failures: int
    rules_unused: list[str]
    ignores_spikes: bool = False
    requests: int = 0
    unused_kernels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        watches: Sequence[ModelWatch],
        steps: int,
        steps_watched: int,
        without_gradient: int,
        failures: int,
        rules_unused: list[str],
        ignores_spikes: bool,
    ) -> GuardCoverage:
        """Sums up what the watches of a guard have checked so far."""
        wanted = watches[0].wanted
        counts = [watch.modules.count(watch.model) for watch in watches]
        num_watched = sum(count for _, count in counts)
        return cls(
            **vars(coverage_of([watch.recorder for watch in watches])),
            modules=sum(count for count, _ in counts),
            modules_watched=num_watched if wanted.activations else 0,
            steps=steps,
            steps_watched=steps_watched,
            without_gradient=without_gradient,
            not_watched=[kind for kind in Wanted._fields if not getattr(wanted, kind)],
            has_seen_loss=any(watch.has_seen_loss for watch in watches),
            failures=failures,
            rules_unused=rules_unused,
            ignores_spikes=ignores_spikes,
            unused_kernels=_C.unused_kernels(),
        )

    @classmethod
    def unknown(cls, failures: int) -> GuardCoverage:
        """Makes the coverage of a guard whose counts cannot be read."""
        return cls(0, 0, 0, {}, {}, 0, 0, 0, 0, 0, [], False, failures, [])

    def of_requests(self, num_requests: int) -> GuardCoverage:
        """The same where only forwards ran: there were no gradients and no losses."""
        kinds = [kind for kind in self.not_watched if kind in _OF_FORWARDS]
        return replace(
            self, not_watched=kinds, without_gradient=0, requests=num_requests
        )

    def gaps(self) -> list[str]:
        """Lists what was not checked, in sentences."""
        sentences = []
        if self.not_scanned:
            counts = (f"{count} x {why}" for why, count in self.not_scanned.items())
            sentences.append(f"Not scanned: {', '.join(counts)}.")
        if self.opaque:
            counts = (
                f"{counted(count, 'value')} of type {name}"
                for name, count in self.opaque.items()
            )
            sentences.append(f"Not looked into: {', '.join(counts)}.")
        if self.not_watched:
            kinds = ", ".join(kind.replace("_", " ") for kind in self.not_watched)
            is_default = self.not_watched == ["optimizer_state"]
            why = "off by default" if is_default else "not in `watch`"
            sentences.append(f"Not checked ({why}): {kinds}.")
        if 0 < self.modules_watched < self.modules:
            left_out = self.modules - self.modules_watched
            sentences.append(f"{left_out} of {self.modules} modules were left out.")
        if self.steps_watched < self.steps:
            count = self.steps - self.steps_watched
            sentences.append(f"{count} of {self.steps} steps were not watched.")
        if self.without_gradient:
            parameters = counted(self.without_gradient, "parameter")
            sentences.append(f"{parameters} had no gradient.")
        if not self.has_seen_loss and "loss" not in self.not_watched:
            sentences.append("No loss was seen: `guard.record(loss=loss)` adds it.")
        if self.ignores_spikes:
            sentences.append("Spikes were not looked for: they need `sync='step'`.")
        if self.failures:
            times = counted(self.failures, "time")
            sentences.append(f"The guard itself failed {times}.")
        return sentences

    def __str__(self) -> str:
        """Writes what was checked, what was not, and the rules that match nothing."""
        unit = f"{self.steps_watched} steps"
        if self.requests and not self.steps:
            unit = counted(self.requests, "request")
        checked = (
            f"Checked {self.tensors_listed} tensors in {self.tensors_scanned} "
            f"scans of {self.bytes_scanned} bytes in {unit}."
        )
        by_torch = [
            f"Torch operations scan tensors on {device}, not its kernels: {why}."
            for device, why in self.unused_kernels.items()
        ]
        unused = [
            f"The rule {rule!r} has matched nothing: compare it with a report's labels."
            for rule in self.rules_unused
        ]
        return printable(" ".join([checked, *self.gaps(), *by_torch, *unused]))

    __repr__ = __str__  # in a console and a notebook, too
