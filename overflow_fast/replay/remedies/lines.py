"""Tries guarded forms of the line of an operation."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..places import span_of
from ..rows import Row
from .changes import LineChange
from .failure import Failure
from .ground import Ground, Trial, edited_remedy
from .line_edit import CodePlace
from .line_forms import forms_of
from .own_softmax import softmax_forms
from .source_file import Edit, SourceFile
from .trials import Trials
from .written import Written

_MAX_FORMS = 4


def of_line(failure: Failure, trials: Trials) -> Iterator[Any]:
    """Guarded forms of the expression that calls the operation."""
    op, row = failure.found.op, failure.row
    if op is None or row is None:
        return
    source, node = expression_of(row, trials.ground)
    if source is None or node is None:
        return
    cause = failure.found.cause
    forms = itertools.chain(
        softmax_forms(source, node) if cause == "range overflow" else (),
        (
            (form.text, [Edit(node, form.code)])
            for form in forms_of(Written(source, node), op, cause)
        ),
    )
    for text, edits in itertools.islice(forms, _MAX_FORMS):
        yield edits_tried(text, edits, source, row, trials)


def expression_of(row: Row, ground: Ground) -> tuple[SourceFile | None, ast.AST | None]:
    """The file and the expression that called an operation, or None."""
    if not row.frames:
        return None, None
    source, span = ground.source(row.frames[0][0].co_filename), span_of(row.frames)
    return source, None if span is None else source.node_at(span)


def edits_tried(
    text: str, edits: Sequence[Edit], source: SourceFile, row: Row, trials: Trials
) -> Any:
    """The trial of edits of the code that called an operation, to be called.

    Raises:
        NotEditableError: If the file is not what runs.
    """
    after = source.edited(edits)
    place = CodePlace.of(row.frames[0][0])
    change = trials.ground.line_change(LineChange((place,), source.to_run(edits)))
    texts = tuple(t for edit in edits for t in (source.text_of(edit.node), edit.text))
    trial = Trial(edited_remedy(text, edits, after), change, after, texts)
    return functools.partial(trials.attempt, trial)
