"""Numbers as the page carries them: differences, deflated, in base64."""

from __future__ import annotations

import base64
import ctypes
import zlib
from collections.abc import Callable, Sequence

import torch

from ...base.text import printable
from ...guard.files.json_text import dumps
from .columns import Column
from .grid import ALL_ZERO, BITS, FAMILIES, NONFINITE, Sheet, block_of, family_of
from .sparklines import SPARKLINES, sparklines_of

_MOST_COLUMNS = 2000  # about the pixels of a wide window; chosen
_LEAST_COLUMNS = 2  # fewer are no row
_LEAST_RANK_COLUMNS = 16  # below that ranks are not worth their bytes
# Together below 2 MiB with the tables and the page's own code.
_MAX_GRID = 1300 * 1024
_MAX_RANKS = 400 * 1024
_CELLS_A_BYTE = 4  # at best, as a guess to begin with
_HALF = BITS // 2


def payloads(sheet: Sheet, incidents: Sequence[tuple[int, str]] = ()) -> dict[str, str]:
    """Packs all that the page's pictures are drawn from.

    Args:
        sheet: The entries of the records.
        incidents: The steps of incidents, and the kinds of their first bad entries.

    Returns:
        Base64 of deflated bytes by name: "meta" is JSON; "headroom" (int16) and the
        counts (uint8) are `[entries, columns]`; "ranks" is `[records, entries,
        columns]` with columns of its own, where there is room. Each number is the
        difference from that of the column before, and bytes of the same weight are
        together.
    """
    records, most = sheet.records, _MOST_COLUMNS
    columns, found = _fitting(lambda most: _whole(sheet, most), most, _MAX_GRID)
    meta = {
        "rows": [
            [
                printable(value) if isinstance(value, str) else value
                for value in (*each.to_dict().values(), block_of(each.module))
            ]
            + [family_of(each.kind)]
            for each in sheet.entries
        ],
        "columns": [[c.first, c.last] for c in columns],
        "sparklines": sparklines_of(records, columns),
        "sparklineNames": SPARKLINES,
        "ranks": [str(record.run.get("rank", "?")) for record in records],
        "rankColumns": [],
        "families": list(FAMILIES),
        "incidents": [
            {"step": step, "family": family_of(kind)} for step, kind in incidents
        ],
    }
    if len(records) > 1:
        num_rows = max(1, len(records) * len(sheet.entries))
        guess = min(most, _MAX_RANKS * _CELLS_A_BYTE // num_rows)
        columns, ranks = _fitting(lambda most: _by_rank(sheet, most), guess, _MAX_RANKS)
        if len(columns) >= min(_LEAST_RANK_COLUMNS, len(sheet.columns(most))):
            found |= ranks
            meta["rankColumns"] = [[c.first, c.last] for c in columns]
    return {"meta": _deflated(dumps(meta).encode()), **found}


_Packed = tuple[list[Column], dict[str, str]]


def _fitting(pack: Callable[[int], _Packed], most: int, max_bytes: int) -> _Packed:
    """Packs as many columns as there is room for."""
    most = max(_LEAST_COLUMNS, most)
    while True:
        columns, found = pack(most)
        if sum(map(len, found.values())) <= max_bytes or most <= _LEAST_COLUMNS:
            return columns, found
        most = max(_LEAST_COLUMNS, most * 2 // 3)


def _whole(sheet: Sheet, most: int) -> _Packed:
    grid = sheet.grid(most)
    counts = {name: packed(values) for name, values in grid.counts.items()}
    return grid.columns, {"headroom": packed(grid.headroom), **counts}


def _by_rank(sheet: Sheet, most: int) -> _Packed:
    columns, numbers = sheet.columns(most), range(len(sheet.records))
    codes = torch.cat([sheet.headroom_of(which, columns) for which in numbers])
    # Half bits, so that there is room for more columns.
    special = (codes == NONFINITE) | (codes >= ALL_ZERO)
    halves = torch.where(special, codes, codes // _HALF * _HALF)
    return columns, {"ranks": packed(halves)}


def packed(codes: torch.Tensor) -> str:
    """Packs int16 or uint8 of shape `[rows, columns]`; see `payloads()`."""
    before = torch.nn.functional.pad(codes.int(), (1, 0))[:, :-1]
    steps = codes.int() - before
    planes = [steps & 255] + (
        [(steps >> 8) & 255] if codes.dtype == torch.int16 else []
    )
    return _deflated(b"".join(map(_bytes, planes)))


def _bytes(values: torch.Tensor) -> bytes:
    flat = values.to(torch.uint8).contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def _deflated(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()
