"""Labels of entries as text: `input[0]`, `grad_output`, `output['logits']`."""

from __future__ import annotations

import re

from .. import _C
from ..tree import ATTRIBUTE, INDEX, KEY, Part, path_text

_BRACKETS = re.compile(r"""\[['"]?(.*?)['"]?\]""")
_STYLES = {
    _C.LabelStyle.INDEX: INDEX,
    _C.LabelStyle.KEY: KEY,
    _C.LabelStyle.ATTRIBUTE: ATTRIBUTE,
}


def label_text(label: _C.Label) -> str:
    """Writes a label as text, such as `output[0]['logits']`."""
    path = [Part(_STYLES[part.style], part.value) for part in label.parts]
    return f"{label.name}{path_text(path)}"


def dotted(label: str) -> str:
    """Writes a label with `.x` for each `[x]` and `['x']`, as in patterns."""
    return _BRACKETS.sub(r".\1", label)


def entry_label(place: _C.Place) -> str:
    """Writes an entry's label; a gradient's is that of the output it belongs to."""
    return f"{'grad_' * (place.kind == _C.FrameKind.BACKWARD)}{label_text(place.label)}"
