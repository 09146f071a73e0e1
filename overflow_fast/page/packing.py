"""Numbers as the page carries them: differences, deflated, in base64."""

from __future__ import annotations

import base64
import ctypes
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from ..core.strict_json import to_plain
from ..record.table import FlightRecord
from .grid import Grid, make_grid
from .row_names import block_of, family_of
from .strips import strips_of

_MOST_COLUMNS = 2000
_LEAST_COLUMNS = 16
# Together below 2 MiB with the tables and the page's own code.
_MAX_GRID = 1000 * 1024
_MAX_RANKS = 400 * 1024


def payloads(records: Sequence[FlightRecord]) -> dict[str, str]:
    """Packs all that the page's pictures are drawn from.

    Returns:
        Base64 of deflated bytes by name: "meta" is JSON; "headroom" (int16) and the
        counts (uint8) are `[entries, columns]`, "ranks" is `[records, entries,
        columns]` with columns of its own. Each number is the difference from that of
        the column before, and bytes of the same weight are together.
    """
    grid, found = _fitting(records, _MAX_GRID, _whole)
    meta = {
        "rows": [
            [e.model, e.module, e.class_name, e.kind, e.label, e.dtype, e.limit]
            + [e.numel, block_of(e.module), family_of(e.kind)]
            for e in grid.entries
        ],
        "columns": [[c.first, c.last] for c in grid.columns],
        "strips": strips_of(records, grid.columns),
        "ranks": [str(record.run.get("rank", "?")) for record in records],
        "rankColumns": [],
    }
    if len(records) > 1:
        ranks, packed = _fitting(records, _MAX_RANKS, _by_rank)
        found |= packed
        meta["rankColumns"] = [[c.first, c.last] for c in ranks.columns]
    return {"meta": _deflated(json.dumps(to_plain(meta)).encode()), **found}


def _fitting(
    records: Sequence[FlightRecord], most_bytes: int, pack: Any
) -> tuple[Grid, dict[str, str]]:
    """A grid with as many columns as there is room for."""
    columns = _MOST_COLUMNS
    while True:
        grid = make_grid(records, columns)
        packed: dict[str, str] = pack(grid)
        size = sum(map(len, packed.values()))
        if size <= most_bytes or columns <= _LEAST_COLUMNS:
            return grid, packed
        columns //= 2


def _whole(grid: Grid) -> dict[str, str]:
    counts = {name: packed(values) for name, values in grid.counts.items()}
    return {"headroom": packed(grid.headroom), **counts}


def _by_rank(grid: Grid) -> dict[str, str]:
    return {"ranks": packed(torch.cat(grid.by_record))}


def packed(codes: torch.Tensor) -> str:
    """Packs int16 or uint8 of shape `[rows, columns]`; see `payloads()`."""
    before = torch.nn.functional.pad(codes.int(), (1, 0))[:, :-1]
    steps = codes.int() - before
    planes = [steps & 255] + ([(steps >> 8) & 255] if codes.dtype == torch.int16 else [])
    return _deflated(b"".join(map(_bytes, planes)))


def _bytes(values: torch.Tensor) -> bytes:
    flat = values.to(torch.uint8).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


