"""Writes docs/causes.md: the failures of benchmarks/answers, and what the guard says.

python docs/tools/causes.py
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from answers.failure import MARK, Failure
from answers.families import FAILURES
from answers.run import ask

PAGE = Path(__file__).parents[1] / "causes.md"
_HEAD = """\
# Causes

<!-- Written by docs/tools/causes.py. -->

{count} failures from public reports, made again in small models, by cause. Each has
the reason, what to do, and what the guard said when the failure was run with
`guard.run`: its cause with the line and the operation, the evidence, the remedies
that it tried on the step, and the ones that did not help. Where the guard does not
know the cause, it says so.

Lines of code are those of
[benchmarks/answers/families](../benchmarks/answers/families); `cured` is False in
them, and True in the run that is finite. A test runs the failures again. Yours is not
here? Look at [my run is nan](my-run-is-nan.md) for where to begin.
"""
# Of a cause: what it means and what helps in general.
CLASSES = {
    "range overflow": """\
The result is a number, and the dtype cannot hold it: float16's maximum is 65504,
that of bfloat16 and float32 3.4e38. Use a wider dtype for that module
([`keep_in_fp32`](guides/precision.md#parts-of-a-model-in-float32)), change the order of
operations so that numbers stay small, or bound the argument of an `exp`.""",
    "undefined": """\
The operation has no finite value for its inputs in any precision: 0 / 0, the
logarithm of 0, the root of a negative number, a softmax of nothing but -inf. Bound
the input, not the output.""",
    "underflow": """\
A number too small for the dtype became 0 before, and an operation such as a logarithm
or a division was given that 0: the evidence names where it was lost. Use the form that
never makes the small number: `log_softmax`, `logsigmoid`, `logsumexp`; or a lower
bound that the dtype holds.""",
    "rounding": """\
A result was rounded before, such as a sigmoid or a `tanh` to 1, and the operation that
fails was given the rounded number. Use the form that never makes it, such as
`logsigmoid` of the negative logit.""",
    "singular gradient": """\
The forward is finite, and its derivative is not: a root or a power below 1 at 0,
`acos` at 1, or the branch that `torch.where` leaves out. Bound the input of the
operation, so that backward cannot reach the singular place.""",
    "gradient explosion": """\
The forward is finite, and the gradient grows by a factor with each call or module
that it goes back through, until the dtype cannot hold it. Smaller or orthogonal
weights, normalizations or residual connections keep the factor near 1. Clipping by the
norm afterwards comes too late for an inf.""",
    "empty reduction": """\
A mean, or a division by a count, of no elements. Divide by at least 1, or return 0.""",
    "divergence": """\
The weights have grown so far that a layer overflows; with the weights as large as
some steps ago the same step is finite. Lower the learning rate, warm up, clip
gradients.""",
    "bad setting": """\
A learning rate, weight decay, epsilon or beta in `param_groups` was nan or inf in a
step. The weights are lost: load a checkpoint, and check what sets it.""",
    "bad data": """\
The batch was non-finite before the model saw it.""",
    "bad weights": """\
A weight or a buffer was non-finite before the step: a bad checkpoint, or memory that
was never initialized.""",
    "not reproducible": """\
The same step is finite when it is run again, or it reads memory that nothing has
written to.""",
    "only in compiled code": """\
The compiled step is non-finite each time, and the same code run eagerly is not.""",
}

# What stands in titles for words of the functions' names.
_WORDS = {
    "nan to num": "`nan_to_num`",
    "where": "`torch.where`",
    "logsumexp": "`logsumexp`",
    "logaddexp": "`logaddexp`",
    "half": "float16",
}


def tidied(said: str) -> str:
    """The text of a guard, without what differs between two runs."""
    lines = [line for line in said.splitlines() if not line.startswith("replays")]
    text = "\n".join(lines).replace(f"  {MARK}", "")
    return re.sub(r"on cpu of host \S+", "on cpu of host HOST", text)


def entry(failure: Failure, said: str) -> str:
    """The part of the page on a failure.

    Args:
        failure: The failure.
        said: The explanation.
    """
    why = textwrap.fill(" ".join((inspect.getdoc(failure.build) or "").split()), 100)
    sources = ", ".join(map(_link, failure.source.split(", ")))
    parts = (
        f"### {_title(failure)}",
        why,
        f"```\n{said}\n```",
        f"Reported in {sources}.",
    )
    return "\n\n".join(parts) + "\n"


def page(said: dict[str, str]) -> str:
    """The whole page.

    Args:
        said: The explanation of each failure, by its name.
    """
    parts = [_HEAD.format(count=len(FAILURES))]
    for cause, text in CLASSES.items():
        own = _of_cause(cause)
        parts.append(f"## {cause.capitalize()}\n\n{text}\n")
        parts += [entry(failure, said[failure.name]) for failure in own]
    return "\n".join(parts)


def shown(text: str) -> dict[str, str]:
    """The explanations that a page has, by the names of their failures."""
    found = re.findall(r"^### .*?^```\n(.*?)\n```$", text, re.M | re.S)
    names = [each.name for cause in CLASSES for each in _of_cause(cause)]
    return dict(zip(names, found, strict=True))


def _of_cause(cause: str) -> list[Failure]:
    return [each for each in FAILURES.values() if each.causes[0] == cause]


def _title(failure: Failure) -> str:
    title = failure.name.replace("_", " ")
    for word, plain in _WORDS.items():
        title = re.sub(rf"\b{word}\b", plain, title)
    return title[0].upper() + title[1:]


def _link(source: str) -> str:
    repository, number = source.split("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    answers = {name: ask(each, "ours-run") for name, each in FAILURES.items()}
    PAGE.write_text(page({name: tidied(a[-1].text) for name, a in answers.items()}))
