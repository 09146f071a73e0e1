"""How the settings of two runs are unlike: a diff of two dicts, said in one line."""

from __future__ import annotations

from collections.abc import Mapping

from ...base.text import some
from .run_settings import RUN, Settings

_MAX_NAMES, _MAX_TEXTS = 3, 12  # that are listed; chosen


class Unlike:
    """Collects what is unlike, each setting of each name once.

    A schedule of learning rates is one difference, not one a step.
    """

    def __init__(self) -> None:
        self._names = dict[str, list[str]]()  # of each text
        self._known = set[tuple[str, str]]()

    def add(
        self, mine: Settings, its: Settings, twins: Mapping[str, str]
    ) -> dict[str, list[str]]:
        """Adds the settings that differ.

        Args:
            mine: The settings of the first run.
            its: Those of the reference.
            twins: The modules of the reference by those of the first run, where they
                have other names.

        Returns:
            Clauses such as "eps is 0.1, against 1e-05", by the name that has them.
        """
        found = dict[str, list[str]]()
        for key, values in mine.items():
            name, _, call = key.partition(" #")
            twin = twins.get(name, name)
            others = its.get(f"{twin} #{call}" if call else twin, values)
            names = dict.fromkeys((*values, *others))
            unlike = [n for n in names if values.get(n) != others.get(n)]
            if "class" in unlike:  # other settings of an optimizer follow from that
                unlike = ["class"]
            for setting in unlike:
                own, other = (side.get(setting, "none") for side in (values, others))
                text = f"{setting} is {own}, against {other}"
                found.setdefault(name, []).append(text)
                self.note(name or "the model", setting, text)
        return found

    def note(self, name: str, setting: str, text: str) -> None:
        """Notes that a setting of a name is unlike."""
        if (name, setting) not in self._known:
            self._known.add((name, setting))
            self._names.setdefault(text, []).append(name)

    def __str__(self) -> str:
        """One sentence, or "" if nothing is unlike."""
        texts = [
            text if names == [RUN] else f"{text} ({some(names, _MAX_NAMES)})"
            for text, names in self._names.items()
        ]
        left = len(texts) - _MAX_TEXTS
        if left > 0:
            texts[_MAX_TEXTS:] = [f"{left} more"]
        return f"Also unlike: {'; '.join(texts)}." if texts else ""
