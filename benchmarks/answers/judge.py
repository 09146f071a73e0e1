"""The rule by which every tool's answer is judged.

- A part of an answer (phase, cause, op, module, line, sample, tensor) is right if it is
  that of the truth, wrong if the tool names another, and missing if it names none.
- The module counts as named also where the tool names the module directly above or
  below it; the operation also where the tool shows the marked line, whatever operation
  it calls it, and where a backward operation is shown with the forward's line.
- An answer misleads if it names another cause, or another place: an operation, module
  or line that is wrong, and none that is right. A phase misleads alone where neither
  operation, line nor cause is right.
- No place misleads in a run that diverges, where it is by chance which operation
  overflows first, where the data is bad, and where compiled code alone fails. The
  module of a bad weight is no place of an optimizer's update.
- What a tool does not say itself and only a reader would conclude (phase and cause,
  read from the prints of transformers' detector and of msprobe) counts where it is
  right, and is no fault where it is wrong.
- Of several ranks all answers are read: a part is right if one rank has it right, and
  they mislead if one does.
- The first line alone is enough where it has the cause's name, or the words that
  reports have for it, and the marked line, the operation or the tensor.
- No alarm at all, or no answer, is missing and does not mislead.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from overflow_fast.guard.report.causes import DIVERGENCE, Cause
from overflow_fast.guard.report.gist import spoken_name

from .failure import Failure
from .oracle import base_of
from .tools import Answer

PARTS = ("phase", "cause", "op", "module", "line", "sample", "tensor", "first")
OURS = ("ours", "ours-run")
_CONCLUDED = ("transformers", "msprobe")


@dataclass
class Judgement:
    """What of an answer is right: True, False, or None where nothing is named."""

    phase: bool | None
    cause: bool | None
    op: bool | None
    module: bool | None
    line: bool | None
    sample: bool | None
    tensor: bool | None
    first: bool | None
    misleads: bool
    text: str = ""

    def as_row(self) -> dict[str, Any]:
        """A plain dict."""
        return asdict(self)


def judge(failure: Failure, answer: Answer, tool: str) -> Judgement:
    """Judges an answer by the rule above."""
    has_op = bool(failure.op)
    line = _same(answer.line, failure.line) if failure.line and has_op else None
    op = None
    if answer.op is not None:
        bases = [base_of(each) for each in failure.ops] if has_op else []
        op = base_of(answer.op) in bases or line is True
    module = None
    names_weight = bool(answer.tensor) and answer.op is None
    if answer.module is not None and not (
        names_weight and failure.phase == "optimizer"
    ):
        module = _is_near(_plain(answer.module), failure.module)
    cause = None if answer.cause is None else answer.cause in failure.causes
    phase = _same(answer.phase, failure.phase)
    if tool in _CONCLUDED:
        cause = cause or None
        phase = phase or None
    places = [each for each in (op, module, line) if each is not None]
    is_lost = bool(places) and not any(places)
    is_wrong_phase = phase is False and True not in (op, line, cause)
    sample = None if failure.sample is None else _same(answer.sample, failure.sample)
    tensor = None
    if failure.tensor and answer.tensor is not None:
        tensor = _last(answer.tensor) in failure.tensor.split("|")
    if failure.cause == DIVERGENCE.name or not failure.has_module:
        is_lost = False
    misleads = cause is False or is_lost or is_wrong_phase
    first = _is_enough(failure, answer.text) if tool in OURS else None
    parts = (phase, cause, op, module, line, sample, tensor, first)
    return Judgement(*parts, misleads, answer.text)


def _is_enough(failure: Failure, text: str) -> bool:
    """Whether the first line of a report has the cause and its place."""
    line = text.partition("\n")[0]
    has_cause = any(_has_words_of(Cause.of(each), line) for each in failure.causes)
    places = [f"{Path(failure.file).name}:{failure.line}"] if failure.line else []
    places += [spoken_name(each) for each in failure.ops if each]
    places += failure.tensor.split("|") if failure.tensor else []
    return has_cause and (not places or any(each in line for each in places))


def _has_words_of(cause: Cause, line: str) -> bool:
    if cause.name in line.lower():
        return True
    forms = [cause.gist.replace("{name}", cause.name), cause.cancelled]
    texts = (re.sub(r"\{\w+\}", " ", form).split() for form in forms if form)
    return any(
        all(e.strip(":").lower() in line.lower() for e in text) for text in texts
    )


def judge_ranks(failure: Failure, answers: list[Answer], tool: str) -> Judgement:
    """Judges what the ranks say together: all of it is read."""
    judged = [judge(failure, answer, tool) for answer in answers]
    if len(judged) == 1:
        return judged[0]

    def either(part: str) -> bool | None:
        named = [getattr(each, part) for each in judged]
        return True if True in named else False if False in named else None

    texts = [f"rank {i}: {each.text}" for i, each in enumerate(judged)]
    misleads = any(each.misleads for each in judged)
    return Judgement(*map(either, PARTS), misleads, "\n".join(texts))


def _same(named: Any, truth: Any) -> bool | None:
    return None if named is None else bool(named == truth)


def _is_near(named: str, truth: str) -> bool:
    """Whether it is the module, or directly above or below it."""
    if named == truth or not (named and truth):
        return named == truth
    return _above(truth) == named or _above(named) == truth


def _plain(name: str) -> str:
    """A name without what wrappers of the model prepend."""
    for prefix in ("_orig_mod", "module"):
        name = "" if name == prefix else name.removeprefix(f"{prefix}.")
    return name


def _last(name: str) -> str:
    """A tensor's name; of an expression such as `batch['x']` the key."""
    key = re.fullmatch(r"batch\['(.+)'\]", name)
    return _plain(name) if key is None else key[1]


def _above(name: str) -> str:
    return name.rpartition(".")[0]
