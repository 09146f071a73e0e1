"""The command `explain`: a step, from the folder of its evidence."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from ...guard.files.json_text import dumps
from .subcommand import Commands, add_command, command, fail


@command(after="report")
def add_explain(commands: Commands) -> None:
    """Adds the command `explain`."""
    parser = add_command(
        commands,
        "explain",
        _run_explain,
        "explain a non-finite step from the folder of its evidence",
        "explain evidence/overflow_fast/RUN/step-00000012 --model train.py:build",
        more=(
            ": [how](explanations.md#explain-it-elsewhere); `--any-weights` "
            "accepts other weights than those of the step"
        ),
        needs_extension=True,
    )
    parser.add_argument("folder", help="the folder, such as evidence/.../step-00000012")
    parser.add_argument(
        "--model",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="a function that returns the model with the weights of the step",
    )
    parser.add_argument(
        "--loss",
        metavar="FILE.py:FUNCTION",
        help="a function that takes the model and the batch and returns the loss",
    )
    parser.add_argument(
        "--any-weights", action="store_true", help="explain with other weights, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_explain(parsed: argparse.Namespace) -> int:
    from ...explainer.explain_folder import explain_folder, function_at, require_step
    from ...explainer.step_file import UnreadableStepError
    from .terminal import shown

    try:
        require_step(parsed.folder)
        model = _made(function_at("--model", parsed.model))
        loss = None if parsed.loss is None else function_at("--loss", parsed.loss)
        found = explain_folder(
            parsed.folder, model, loss, any_weights=parsed.any_weights
        )
    except UnreadableStepError as error:
        return fail(f"The step cannot be explained: {error}.")
    text = "" if parsed.json else shown(str(found))
    print(dumps(found.to_dict(), indent=1) if parsed.json else text)
    return 0


def _made(make: Callable[..., Any]) -> Any:
    from torch import nn

    from ...explainer.step_file import UnreadableStepError

    wanted = "--model must name a function that takes no arguments and returns a model"
    if isinstance(make, nn.Module):
        raise UnreadableStepError(f"{wanted}, got a {type(make).__name__}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UnreadableStepError(f"{wanted}: {error}") from error
    except ValueError:  # it has no signature
        pass
    return make()
