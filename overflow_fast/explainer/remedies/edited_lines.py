"""Remedies that are edits of the program's lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...base.source_files import is_of_program, is_of_user
from ...guard.report.remedy import Remedy
from ..syntax import module_of
from ..torch_calls import TorchCall
from ..users_lines import source_lines
from .source import Edit, NotWrittenError, SourceText, span_of

_MOST_BLOCK = 40  # lines; edits that are farther from one another are listed alone


def shown_at(root: TorchCall) -> tuple[str, int]:
    """The file and line, none of torch's, that a remedy is of; "" and 0 if none."""
    own = [e for e in root.sites if is_of_user(e.file) and source_lines(e.code)]
    return (SourceText.of(own[0].file).shown, own[0].line) if own else ("", 0)


def inner_place(root: TorchCall) -> str:
    """The place of a call that an installed package makes, or ""."""
    site = root.sites[0]
    return "" if is_of_program(site.file) else site.text


def remedy_in_words(text: str, root: TorchCall) -> Remedy:
    """Makes the remedy of a call for which there is no line."""
    file, line = shown_at(root)
    return Remedy(text, file=file, line=line, last_line=line)


def remedy_of(text: str, edits: Sequence[Edit], told: Sequence[Remedy] = ()) -> Remedy:
    """Makes the remedy of edits: one block of lines, where they are near one another.

    Args:
        text: The edits in words.
        edits: The edits.
        told: What else belongs to it, and is no edit of a file.
    """
    places: list[tuple[str, int, int]] = []
    for file, first, last in sorted((e.file, *span_of(e.node)[:2]) for e in edits):
        if places and places[-1][0] == file and first <= places[-1][2]:
            first, last = places[-1][1], max(last, places.pop()[2])
        places.append((file, first, last))
    if len({e.node for e in edits}) < len(set(edits)):
        raise NotWrittenError("edits are of one expression")

    def part(file: str, first: int, last: int) -> Remedy:
        source, own = SourceText.of(file), [e for e in edits if e.file == file]
        module_of(source.block(own, 1, len(source.lines)))  # else it is no text to give
        code = source.block(own, first, last)
        return Remedy(text, code, file=source.shown, line=first, last_line=last)

    parts = [*(part(*place) for place in places), *told]
    if len(parts) == 1:
        return replace(parts[0], text=text)
    code = "\n".join(each.code for each in parts) if all(e.code for e in parts) else ""
    first, last = places[0][1:] if places else (0, 0)
    last = max((each[2] for each in places), default=0)
    is_block = not told and len({each[0] for each in places}) == 1
    if is_block and last - first <= _MOST_BLOCK:
        return replace(part(places[0][0], first, last), parts=tuple(parts))
    return Remedy(text, code, parts=tuple(parts))
