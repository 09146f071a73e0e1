"""The sentences of a report on headroom."""

from __future__ import annotations

from ..verdict.verdict import EntryHeadroom

_FEW_BITS = 8


def headroom_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes how large the first bad entry was when it was last finite."""
    if headroom is None or headroom.abs_max == 0:
        return []
    return [
        f"When it was last finite, its largest magnitude was {headroom.abs_max:.3g}, "
        f"{headroom.bits:.1f} bits below the end of {headroom.dtype} "
        f"({headroom.limit:.5g})."
    ]


def least_sentences(headroom: EntryHeadroom | None) -> list[str]:
    """Writes which value is nearest to the end of its dtype, if it is near."""
    if headroom is None or headroom.bits > _FEW_BITS:
        return []
    return [
        "The finite value nearest to the end of its dtype: "
        f"{headroom.where}, {headroom.bits:.1f} bits below."
    ]
