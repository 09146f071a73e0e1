"""The counts of what a guard has checked, and what not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..capture.watch import ModelWatch
from ..core.selection import Wanted
from ..text import counted, printable


@dataclass(frozen=True)
class GuardCoverage:
    """The tensors and steps that a guard's clean verdicts cover, and the gaps.

    Attributes:
        tensors_listed: How many tensors the frames list.
        tensors_scanned: How many scans that took.
        bytes_scanned: How many bytes the scanned tensors have.
        not_scanned: How many listed tensors were not scanned, by the reason.
        opaque: How many values may hold tensors and were not looked into, by type.
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
    """

    tensors_listed: int
    tensors_scanned: int
    bytes_scanned: int
    not_scanned: dict[str, int]
    opaque: dict[str, int]
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
        found = [watch.recorder.coverage for watch in watches]
        reasons: Counter[str] = Counter()
        opaque: Counter[str] = Counter()
        for each in found:
            reasons.update(each.reasons())
            opaque.update(each.opaque())
        wanted = watches[0].wanted
        counts = [watch.modules.count(watch.model) for watch in watches]
        return cls(
            sum(each.tensors_listed for each in found),
            sum(each.tensors_scanned for each in found),
            sum(each.bytes_scanned for each in found),
            dict(reasons),
            dict(opaque),
            sum(count for count, _ in counts),
            sum(count for _, count in counts) if wanted.activations else 0,
            steps,
            steps_watched,
            without_gradient,
            [kind for kind in Wanted._fields if not getattr(wanted, kind)],
            any(watch.has_seen_loss for watch in watches),
            failures,
            rules_unused,
            ignores_spikes,
        )

    @classmethod
    def unknown(cls, failures: int) -> GuardCoverage:
        """Makes the coverage of a guard whose counts cannot be read."""
        return cls(0, 0, 0, {}, {}, 0, 0, 0, 0, 0, [], False, failures, [])

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
        checked = (
            f"Checked {self.tensors_listed} tensors in {self.tensors_scanned} scans "
            f"of {self.bytes_scanned} bytes in {self.steps_watched} steps."
        )
        unused = [
            f"The rule {rule!r} has matched nothing: compare it with a report's labels."
            for rule in self.rules_unused
        ]
        return printable(" ".join([checked, *self.gaps(), *unused]))
