"""The changes that are in place while further ones are tried, and their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..change import Change
from ..explanation import Remedy
from .changes import Changes, LineChange
from .source_file import Edit, SourceFile, span_in

_MAX_BLOCK = 40  # lines; edits that are farther from one another are listed alone


@dataclass(frozen=True)
class Trial:
    """A change to try.

    Attributes:
        remedy: It in words and as code.
        change: The change.
        source: The file as it reads with it; None where it edits none.
        texts: The expressions that it edits, before and after.
    """

    remedy: Remedy
    change: Change
    source: SourceFile | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ground:
    """The changes that are in place while further ones are tried.

    Attributes:
        remedies: They in words and as code.
        changes: The changes.
        sources: The files as they read with them, by name.
    """

    remedies: tuple[Remedy, ...] = ()
    changes: tuple[Change, ...] = ()
    sources: Mapping[str, SourceFile] = field(default_factory=dict)

    def source(self, name: str) -> SourceFile:
        """A file as it reads now."""
        return self.sources.get(name) or SourceFile(name)

    def line_change(self, change: LineChange) -> LineChange:
        """A further edit of a file, which holds those that are in place."""
        before = [
            each
            for each in self.changes
            if isinstance(each, LineChange) and each.file == change.file
        ]
        places = dict.fromkeys([p for each in before for p in each.places])
        return replace(change, places=(*places, *change.places))

    def with_trial(self, trial: Trial) -> Ground:
        """These changes and a further one."""
        file = trial.change.file if isinstance(trial.change, LineChange) else ""
        kept = [
            each
            for each in self.changes
            if not (file and isinstance(each, LineChange) and each.file == file)
        ]
        sources = dict(self.sources)
        if trial.source is not None:
            sources[trial.source.name] = trial.source
        return Ground((*self.remedies, trial.remedy), (*kept, trial.change), sources)

    def after(self, trial: Trial) -> Ground:
        """These changes and a further one, to go on from: it runs as it reads."""
        change = trial.change
        if isinstance(change, LineChange) and trial.source is not None:
            change = replace(change, text=trial.source.text)
        return self.with_trial(replace(trial, change=change))

    @property
    def change(self) -> Change:
        """All of the changes."""
        return self.changes[0] if len(self.changes) == 1 else Changes(self.changes)

    @property
    def remedy(self) -> Remedy:
        """All of the changes as one remedy."""
        return joined(self.remedies, self.sources)


def edited_remedy(text: str, edits: Sequence[Edit], after: SourceFile) -> Remedy:
    """Makes the remedy of edits of one file.

    Args:
        text: The edits in words.
        edits: The edits.
        after: The file as it reads with them.
    """
    parts: list[Remedy] = []
    for first, last, _, _ in sorted(span_in(edit.node) for edit in edits):
        code = after.block(first, last)
        part = Remedy(text, code, file=after.name, line=first, last_line=last)
        _add(parts, part, {after.name: after})
    return _whole(text, parts, {after.name: after})


def joined(remedies: Sequence[Remedy], sources: Mapping[str, SourceFile]) -> Remedy:
    """Joins remedies into one.

    Args:
        remedies: The remedies, in the order in which they were found.
        sources: The files as they read with all of them, by name.
    """
    if len(remedies) == 1:
        return remedies[0]
    parts: list[Remedy] = []
    for remedy in remedies:
        for part in remedy.parts or (remedy,):
            _add(parts, part, sources)
    text = ", and ".join(dict.fromkeys(remedy.text for remedy in remedies))
    return _whole(text, parts, sources)


def _add(parts: list[Remedy], part: Remedy, sources: Mapping[str, SourceFile]) -> None:
    """Adds a part; what edits the same lines as another becomes one with it."""
    for i, other in enumerate(parts):
        is_apart = part.line > other.last_line or other.line > part.last_line
        if part.file and other.file == part.file and not is_apart:
            first = min(part.line, other.line)
            last = max(part.last_line, other.last_line)
            texts = dict.fromkeys([other.text, part.text])
            code = sources[part.file].block(first, last)
            parts[i] = replace(
                part, text=", and ".join(texts), code=code, line=first, last_line=last
            )
            return
    parts.append(part)


def _whole(
    text: str, parts: Sequence[Remedy], sources: Mapping[str, SourceFile]
) -> Remedy:
    """Parts as one remedy: one block of lines, where they are near one another."""
    if len(parts) == 1:
        return replace(parts[0], text=text)
    code = "\n".join(part.code for part in parts)
    whole = Remedy(text, code, parts=tuple(parts))
    files = {part.file for part in parts}
    first, last = parts[0].line, parts[0].last_line
    for part in parts:
        first, last = min(first, part.line), max(last, part.last_line)
    file = parts[0].file
    if not file or len(files) > 1 or last - first > _MAX_BLOCK:
        return whole
    code = sources[file].block(first, last)
    return replace(whole, code=code, file=file, line=first, last_line=last)
