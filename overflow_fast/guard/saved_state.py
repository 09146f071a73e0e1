"""Checks a checkpoint that is saved, or a state dict: which tensors are not finite.

A state dict does not say which of its tensors are weights and which are buffers. So a
rule of `allow` for either applies, and -inf alone, as masks hold it, is no exception.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .. import _C
from ..base.tensors import kinds_in, signs_of, widened
from ..base.text import counted, dtype_name, printable, some
from ..base.types import TensorPath
from ..scanner.ops import Scanned, scan_values
from .files.json_text import SCHEMA
from .files.saved_tensors import SavedTensor, saved_tensors, tensors_in_state
from .kinds import Path
from .report.report import Report
from .verdict.rules import Rules
from .verdict.verdict import BadEntry, Origin, Verdict

_FEW = 8  # names in a sentence; chosen


@dataclass
class SavedState:
    """The tensors of a checkpoint that are not finite.

    Attributes:
        path: The file or folder; "" of a state dict.
        num_tensors: How many tensors were scanned.
        num_bytes: Their size.
        bad: Those that hold a nan or an inf that no rule allows, by file and name.
        not_checked: Sentences for what could not be read or scanned.
    """

    path: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    bad: list[BadEntry] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @property
    def is_finite(self) -> bool | None:
        """True or False; None where no bad value was found and not all was checked."""
        if self.bad:
            return False
        return None if self.not_checked else True

    @property
    def gist(self) -> str:
        """The path and what was found there, as a clause."""
        if self.bad:
            found = f"{len(self.bad)} not finite"
        elif not self.not_checked:
            found = "finite"
        elif self.num_tensors:
            found = "no non-finite value found, but not all was checked"
        else:
            found = "nothing could be checked"
        return f"{self.path or 'the state dict'}: {found}"

    def __str__(self) -> str:
        """Writes what was found in a line, and a line for each tensor that is bad."""
        tensors = counted(self.num_tensors, "tensor")
        size = f" ({tensors}, {self.num_bytes / 2**20:.1f} MiB)"
        lines = [
            f"{self.gist}{size if self.num_tensors else ''}",
            *(f"  {e.label}: {e.nonfinite_text()}, {e.dtype}" for e in self.bad),
            *(f"  not checked: {each}" for each in self.not_checked),
        ]
        return "\n".join(map(printable, lines))

    def to_dict(self) -> dict[str, Any]:
        """Returns it as strings, numbers, lists and dicts."""
        bad = [
            {
                "name": each.label,
                "dtype": each.dtype,
                "numel": each.numel,
                "num_nan": each.num_nan,
                "num_inf": each.num_inf,
            }
            for each in self.bad
        ]
        return {
            "schema": SCHEMA,
            "kind": "saved_state",
            "path": self.path,
            "is_finite": self.is_finite,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "bad": bad,
            "not_checked": self.not_checked,
        }

    def report(self) -> Report | None:
        """Returns the report of what is not finite, or None."""
        if not self.bad:
            return None
        first = self.bad[0]
        origin = Origin("given", "unclear", "what was saved", [first.label])
        notes = [
            f"All non-finite tensors: {some((e.label for e in self.bad), _FEW)}.",
            "Load an older checkpoint.",
        ]
        if all(e.signs == "-" and not e.num_nan for e in self.bad):
            notes[1] = "If this is intended, as in a mask, allow={'*:buffer*': '-inf'}."
        verdict = Verdict(first=first, origin=origin, num_bad_frames=len(self.bad))
        return Report(0, "raise", verdict, notes=notes, is_of_state=True)


def is_state_dict(value: object) -> bool:
    """True for a dict of tensors and no models, such as `model.state_dict()`."""
    if not isinstance(value, Mapping):
        return False
    if any(isinstance(each, nn.Module) for each in value.values()):
        return False
    return next(tensors_in_state(value), None) is not None


def check_saved(source: Path | Mapping[str, Any], rules: Rules) -> SavedState:
    """Scans the tensors of a file, a folder or a state dict one after another.

    Incurs one CPU-GPU sync for each tensor on a device; files are read on the host.

    Args:
        source: The path, or the state dict.
        rules: The values that are allowed.

    Raises:
        OSError, ValueError: If there is no such path, or no checkpoint.
    """
    if isinstance(source, Mapping):
        found = SavedState()
        named: Iterable[SavedTensor] = (
            SavedTensor("", *each) for each in tensors_in_state(source)
        )
    else:
        found = SavedState(os.fspath(source))
        named = saved_tensors(source, found.not_checked)
    for each in named:
        _check(each, rules, found)
    if not (found.num_tensors or found.not_checked):
        found.not_checked.append("it holds no tensor")
    return found


def _check(saved: SavedTensor, rules: Rules, found: SavedState) -> None:
    name = f"{saved.file}: {saved.name}" if saved.file else saved.name
    (scanned,) = scan_values([saved.tensor])
    if scanned.stat is None:
        found.not_checked.append(f"{name} was not scanned: {scanned.why_not}")
        return
    found.num_tensors += 1
    found.num_bytes += saved.tensor.nbytes
    kinds = kinds_of(scanned)
    if kinds & ~_allowed(saved.name, rules):
        found.bad.append(entry_of("tensor", name, scanned, kinds))


def kinds_of(scanned: Scanned) -> int:
    """Finds a tensor's kinds of non-finite values, as bits; a sync where there is any.

    Args:
        scanned: The tensor and its counts; 0 if it could not be scanned.
    """
    tensor, stat, _ = scanned
    if stat is None or not (stat.num_nan or stat.num_inf):
        return 0
    return kinds_in(widened(tensor))


def entry_of(kind: str, name: str, scanned: Scanned, kinds: int) -> BadEntry:
    """The entry of a verdict for a scanned tensor that belongs to no call."""
    tensor, stat, _ = scanned
    assert stat is not None
    return BadEntry(
        kind,
        name,
        "",
        name,
        dtype=dtype_name(tensor.dtype),
        numel=tensor.numel(),
        num_nan=stat.num_nan,
        num_inf=stat.num_inf,
        signs=signs_of(kinds),
    )


def _allowed(name: str, rules: Rules) -> int:
    """The kinds that a rule allows a weight or a buffer of this name to hold."""
    kinds = 0
    for role in (_C.Role.WEIGHT, _C.Role.BUFFER):
        kinds |= rules.allowed(TensorPath.from_fqn(role.name.lower(), name))
    return kinds
