"""What each tool says of a failure."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.report.causes import (
    BAD_DATA,
    BAD_WEIGHTS,
    RANGE_OVERFLOW,
    UNKNOWN,
)

from .failure import Failure, Run, train

_ASKED_FOR = ("full", "fill", "lift_fresh", "scalar_tensor")  # masks of -inf


@dataclass
class Answer:
    """What a tool has named; None for what it does not speak of.

    Attributes:
        phase: The phase.
        cause: The cause.
        op: The operation.
        module: The module's name.
        line: The number of the line in the failure's file.
        tensor: The weight, buffer or key of the batch.
        sample: The sample.
        text: What a user reads.
    """

    phase: str | None = None
    cause: str | None = None
    op: str | None = None
    module: str | None = None
    line: int | None = None
    tensor: str | None = None
    sample: int | None = None
    text: str = ""


def guard(failure: Failure, run: Run) -> Answer:
    """OverflowGuard around the model and its optimizer."""
    return _guarded(failure, run, False)


def guard_run(failure: Failure, run: Run) -> Answer:
    """The same, with the loss computed within guard.run."""
    return _guarded(failure, run, True)


def _guarded(failure: Failure, run: Run, has_loss: bool) -> Answer:
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            OverflowGuard(run.model, run.optimizer, explain="auto") as watcher,
        ):
            step = watcher.run if has_loss else (lambda function: function())
            for _ in train(run, step):
                pass
    except NonFiniteError as error:
        return _of_explanation(failure, error.report)
    return Answer(text="no alarm")


def _of_explanation(failure: Failure, report: Any) -> Answer:
    found = report.explanation
    if found is None:
        return Answer(text=str(report))
    answer = Answer(text=report.answer())
    answer.phase = found.phase or None
    answer.cause = None if found.cause == UNKNOWN.name else found.cause
    answer.tensor = found.tensor or None
    answer.sample = None if found.sample is None else int(found.sample)
    if found.op is not None:
        answer.op, answer.module = found.op.name, found.module
        answer.line = found.op.line if found.op.file == failure.file else None
    elif found.module:
        answer.module = found.module
    return answer


def transformers(failure: Failure, run: Run) -> Answer:
    """transformers' DebugUnderflowOverflow, read by someone who knows it.

    It prints the inputs, weights and outputs of the last modules. What of them is the
    first to be nan or inf is taken for its answer, though it does not say so itself.
    """
    from transformers.debug_utils import DebugUnderflowOverflow

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(ValueError):
        DebugUnderflowOverflow(run.model)
        for _ in train(run):
            pass
    text = out.getvalue()
    frames = re.split(r"\n(?= {18,}\S)", text.split("abs min  abs max  metadata")[-1])
    for frame in frames:
        lines = frame.strip().splitlines()
        bad = [
            line.split()[-1] for line in lines[1:] if re.search(r"\b(nan|inf)\b", line)
        ]
        if not lines or not bad or not text:
            continue
        answer = Answer(phase="forward", module=lines[0].split()[0], text=text[-1500:])
        first = bad[0]
        if first.startswith("input"):
            answer.phase, answer.cause = "data", BAD_DATA.name
        elif not first.startswith("output"):
            answer.phase, answer.cause = "weights", BAD_WEIGHTS.name
            answer.tensor = f"{answer.module}.{first}".lstrip(".")
        elif re.search(r"\binf\b", frame):
            answer.cause = RANGE_OVERFLOW.name
        return answer
    return Answer(text=text or "no alarm")


def detect_anomaly(failure: Failure, run: Run) -> Answer:
    """torch.autograd.detect_anomaly: the node, and the forward line in its warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                for _ in train(run):
                    pass
        except RuntimeError as error:
            return _of_anomaly(failure, str(error), [str(w.message) for w in caught])
    return Answer(text="no alarm")


def _of_anomaly(failure: Failure, error: str, texts: list[str]) -> Answer:
    node = re.search(r"Function '(\w+)' returned nan", error)
    if node is None:
        return Answer(text=error)
    trace = "\n".join(texts)
    places = re.findall(rf'File "{re.escape(failure.file)}", line (\d+)', trace)
    line = int(places[-1]) if places else None
    return Answer("backward", op=node[1], line=line, text=f"{error}\n{trace[-1500:]}")


def debugmode(failure: Failure, run: Run) -> Answer:
    """torch's DebugMode with norms of all tensors, read by a program for its first nan.

    The first operation whose outputs have a nan or inf norm, and whose inputs do not.
    """
    from torch.utils._debug_mode import DebugMode

    mode = DebugMode(record_stack_trace=True, record_nn_module=True, record_ids=True)
    with mode, DebugMode.log_tensor_hashes(hash_fn="norm", hash_inputs=True):
        for loss in train(run):
            bad = [p for p in run.model.parameters() if not p.isfinite().all()]
            if bad or not loss.isfinite():
                break
    modules: list[tuple[int, str]] = []
    for call in mode.logs:
        while modules and modules[-1][0] >= call.call_depth:
            modules.pop()
        if getattr(call, "header", "") == "nn.Mod":
            modules.append((call.call_depth, call.tag.partition(".")[2]))
            continue
        log, name = getattr(call, "log", None) or {}, str(getattr(call, "op", ""))
        if any(made in name for made in _ASKED_FOR):
            continue
        if _is_bad(log.get("hash")) and not _is_bad(log.get("input_hash")):
            return _of_call(failure, call, name, modules[-1][1] if modules else "")
    return Answer(text="no operation with a bad output and good inputs")


def _is_bad(value: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(isinstance(n, float) and (n != n or abs(n) == torch.inf) for n in leaves)


def _of_call(failure: Failure, call: Any, name: str, module: str) -> Answer:
    backward = getattr(call, "fwd_stack_trace", None)
    trace = backward or getattr(call, "stack_trace", None) or ""
    places = re.findall(rf'File "{re.escape(failure.file)}", line (\d+)', str(trace))
    line = int(places[-1]) if places else None
    text = f"{name}\n{str(trace)[-1000:]}"
    return Answer(op=name, module=None if backward else module, line=line, text=text)


TOOLS: dict[str, Callable[[Failure, Run], Answer]] = {
    "ours": guard,
    "ours-run": guard_run,
    "transformers": transformers,
    "detect_anomaly": detect_anomaly,
    "debugmode": debugmode,
}
