"""Tries guarded forms of a line of an optimizer's own step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..explanation import Explanation, Remedy
from ..rows import Row
from .ground import Ground, edited_remedy
from .line_edit import CodePlace, NotEditableError, edited_code
from .line_forms import forms_of
from .lines import expression_of
from .source_file import Edit
from .written import Written

_MAX_FORMS = 4
_GIVEN = " (with gradients of 0)"


def update_remedies(
    row: Row, found: Explanation, is_finite_now: Callable[[], bool]
) -> Iterator[Remedy]:
    """Tries other forms of the line of an operation in an optimizer's step.

    Args:
        row: The operation.
        found: Its explanation.
        is_finite_now: Makes the step again on a copy, with gradients of 0; tells
            whether the weight is finite then.
    """
    source, node = expression_of(row, Ground())
    if found.op is None or source is None or node is None:
        return
    forms = forms_of(Written(source, node), found.op, found.cause)
    for form in itertools.islice(forms, _MAX_FORMS):
        edits = [Edit(node, form.code)]
        try:
            place = CodePlace.of(row.frames[0][0])
            with edited_code((place,), source.to_run(edits)):
                is_finite = is_finite_now()
        except NotEditableError as error:
            found.notes.append(f"A change of the line was not tried: {error}.")
            return
        except Exception:
            is_finite = False
        remedy = edited_remedy(f"{form.text}{_GIVEN}", edits, source.edited(edits))
        yield replace(remedy, is_finite=is_finite)
