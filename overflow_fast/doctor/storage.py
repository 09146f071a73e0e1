"""Memory and the folder of checkpoints: each rank allocates, writes and reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from .stage import (
    BROKEN,
    WARNING,
    ExaminationSettings,
    Finding,
    Site,
    Stage,
    capital,
    named,
)

NAME = "memory and folder"
_MOST = 2**30  # bytes to allocate, of which at most half of what is free
_FILE = 2**20  # bytes of a file


@dataclass
class StorageResult:
    """The success of one rank with memory and folder.

    Attributes:
        host: The name of its host.
        errors: What failed, in sentences.
        unseen: The rank before it, if its file is not to be seen from here.
    """

    host: str
    errors: list[str] = field(default_factory=list)
    unseen: int | None = None


def _run(site: Site) -> StorageResult:
    found = StorageResult(site.hosts[site.rank])
    site.note("memory")
    with _noted(found, "memory"):
        _fill(site.device)
    if site.device.type == "cuda":
        site.note("pinned memory")
        with _noted(found, "pinned memory"):
            torch.empty(_FILE, dtype=torch.uint8, pin_memory=True).fill_(1)
    if site.settings.folder is not None:
        _write_and_read(site, Path(site.settings.folder), found)
    return found


@contextlib.contextmanager
def _noted(found: StorageResult, what: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else None
        found.errors.append(f"{what}: {told or error}".splitlines()[0])


def _fill(device: torch.device) -> None:
    """Allocates memory, writes a pattern, and reads it."""
    size = _FILE
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        size = min(_MOST, free // 2)
    memory = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    if not bool((memory == 0xA5).all()):
        raise RuntimeError("memory does not hold what was written to it")


def _write_and_read(site: Site, folder: Path, found: StorageResult) -> None:
    """Writes a file of one's own, and reads it and that of the rank before."""
    members, place = list(site.members), site.position
    before = members[place - 1]
    own = folder / _name(site.session, site.rank)
    site.note(f"a write to {folder}")
    with _noted(found, f"write to {folder}"), open(own, "xb") as file:
        file.write(_contents(site.rank))
        os.fsync(file.fileno())
    site.note("a barrier after the writes")
    dist.barrier()
    site.note(f"a read from {folder}")
    with _noted(found, f"read from {folder}"):
        if own.exists() and own.read_bytes() != _contents(site.rank):
            raise OSError(f"{own} does not hold what was written to it")
        other = folder / _name(site.session, before)
        if not other.exists():
            found.unseen = before
        elif other.read_bytes() != _contents(before):
            raise OSError(f"{other} does not hold what rank {before} wrote to it")
    site.note("a barrier after the reads")
    dist.barrier()
    with contextlib.suppress(OSError):
        own.unlink()


def _name(session: str, rank: int) -> str:
    return f"overflow_fast_doctor_{session}_{rank}"


def _contents(rank: int) -> bytes:
    return rank.to_bytes(8, "little") * (_FILE // 8)


def _judge(
    data: Mapping[int, StorageResult], settings: ExaminationSettings
) -> list[Finding]:
    hosts = {rank: each.host for rank, each in data.items()}
    found = []
    failed = {rank for rank, each in data.items() if each.errors}
    for rank, each in data.items():
        for text in each.errors:
            sentence = f"{capital(named([rank], hosts))}: {text}."
            found.append(Finding(NAME, BROKEN, (rank,), sentence))
        if each.unseen is not None and not {rank, each.unseen} & failed:
            sentence = (
                f"{capital(named([rank], hosts))} does not see the file that "
                f"{named([each.unseen], hosts)} wrote to {settings.folder}: the folder "
                "is not shared."
            )
            found.append(Finding(NAME, WARNING, (rank, each.unseen), sentence))
    return found


STORAGE = Stage(NAME, _run, _judge)
