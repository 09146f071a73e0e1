"""The command `demo`: a step that is nan, and a T5 that overflows."""

from __future__ import annotations

import argparse
import os

from .subcommand import Commands, add_command, at_least_one, command, fail, reason


@command(after="")
def add_demo(commands: Commands) -> None:
    """Adds the command `demo`."""
    parser = add_command(
        commands,
        "demo",
        _run_demo,
        "train until a step is nan, and watch a T5 overflow",
        "demo --tiny --batch-size 2 --length 32",
        more=", with report and page",
        needs_extension=True,
    )
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="the dtype of the model",
    )
    for name, default, told in (
        ("--batch-size", 4, "texts in a batch"),
        ("--length", 128, "bytes of each text"),
        ("--rounds", 7, "how often to time"),
    ):
        parser.add_argument(name, type=at_least_one, default=default, help=told)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the weights and of dropout"
    )
    parser.add_argument(
        "--page",
        default="overflow_fast_demo.html",
        metavar="FILE",
        help="where the page of the training run is written (default: %(default)s)",
    )
    parser.add_argument("--tiny", action="store_true", help="a small model, for a try")


def _run_demo(parsed: argparse.Namespace) -> int:
    from .terminal import shown

    try:
        from ..demo import DemoSettings, show, train
    except ImportError as error:
        return fail(
            f"The demo needs transformers: `pip install transformers` ({error})."
        )
    try:
        raised = train(parsed.page)
    except OSError as failure:
        return fail(f"overflow_fast demo: {reason(failure)}")
    print(f"\n{shown(f'NonFiniteError: {raised}')}\n")
    print(f"The page of this run: {os.path.abspath(parsed.page)}\n", flush=True)
    status = show(
        DemoSettings(
            parsed.dtype,
            parsed.batch_size,
            parsed.length,
            parsed.rounds,
            parsed.seed,
            parsed.tiny,
        )
    )
    print(f"\nThe page of the training run: {os.path.abspath(parsed.page)}")
    return status if raised is not None else 1
