"""The identity of a run, which marks its lines and folders."""

from __future__ import annotations

import os
import platform
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ... import __version__
from ...base.modules import parameters_of
from ...base.source_files import notebook_shell
from ...base.text import dtype_name, shortened
from ..files.json_text import SCHEMA
from ..process import own_rank, world_size
from ..watching.watch import ModelWatch, models_of
from .log_lines import RunLine

_MOST_MODELS = 32  # that are named in the first line of a file


@dataclass(frozen=True)
class RunIdentity:
    """One guard's run in one process.

    Attributes:
        id: Its name, which no other run has: time, host, process, rank, random digits.
        started: When it began, in UTC.
        host: The machine's name.
        rank: Of `torch.distributed`; 0 without it.
        world_size: How many ranks there are.
    """

    id: str
    started: datetime
    host: str
    rank: int
    world_size: int

    @classmethod
    def begin(cls) -> RunIdentity:
        """Begins a run now."""
        started, host = datetime.now(timezone.utc), socket.gethostname()
        rank, size = own_rank(), world_size()
        parts = [
            f"{started:%Y%m%dT%H%M%SZ}",
            re.sub(r"[^A-Za-z0-9_.-]", "_", host)[:40],
            str(os.getpid()),
            *([f"rank{rank}"] if size > 1 else []),
            secrets.token_hex(3),
        ]
        return cls("-".join(parts), started, host, rank, size)

    def collects(self, ranks: str) -> bool:
        """True if this rank writes a log or record of these ranks; see `Log`."""
        if ranks == "node":
            return os.environ.get("LOCAL_RANK", "0") == "0"
        return ranks == "all" or self.rank == 0

    def path_of_rank(self, path: str | os.PathLike[str]) -> Path:
        """Returns a path of this rank's own: `guard.rank3.jsonl` with several ranks."""
        whole = Path(path)
        if self.world_size == 1 or not whole.name:
            return whole
        return whole.with_name(f"{whole.stem}.rank{self.rank}{whole.suffix}")

    def header(self, watches: Sequence[ModelWatch], policy: object) -> RunLine:
        """Makes the line that a run begins with in a log; see `fields()`."""
        return RunLine(**self.fields(watches, policy))

    def fields(self, watches: Sequence[ModelWatch], policy: object) -> dict[str, Any]:
        """The fields of a run in the first line of a log or of a record.

        Args:
            watches: The watched models.
            policy: The guard's `on_overflow`.
        """
        found = list(models_of(watches).values())
        dtypes = {dtype_name(p.dtype) for model in found for p in parameters_of(model)}
        return {
            "schema": SCHEMA,
            "run": self.id,
            "time": round(self.started.timestamp(), 3),
            "started": f"{self.started:%Y-%m-%dT%H:%M:%SZ}",
            "host": self.host,
            "pid": os.getpid(),
            "script": _script(),
            "rank": self.rank,
            "world_size": self.world_size,
            "overflow_fast": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "models": _names_of(found),
            "dtypes": sorted(dtypes),
            "policy": policy if isinstance(policy, str) else "callable",
        }


def _script() -> str:
    """The program's file, or its package; "" where code is typed."""
    path = Path(next(iter(sys.argv), ""))
    name = path.parent.name if path.stem == "__main__" else path.name
    is_typed = notebook_shell() is not None or name in ("-c", "-m")
    return "" if is_typed else name


def _names_of(models: Sequence[nn.Module]) -> list[str]:
    """The names of models' classes, as far as there is room in a line."""
    names = [shortened(type(model).__name__) for model in models[:_MOST_MODELS]]
    more = len(models) - len(names)
    return [*names, f"{more} more"] if more else names
