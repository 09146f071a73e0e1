"""The command `demo`."""

from __future__ import annotations

import argparse

from .adding import Commands, add_command, fail


def add_to(commands: Commands) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "demo",
        _run,
        "watch a T5 overflow, with transformers' detector and with this",
        "demo --tiny --batch-size 2 --length 32",
    )
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="texts in a batch")
    parser.add_argument("--length", type=int, default=128, help="bytes of each text")
    parser.add_argument("--rounds", type=int, default=7, help="how often to time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a small model, for a try")


def _run(parsed: argparse.Namespace) -> int:
    try:
        from ..demo import Settings, show
    except ImportError as error:
        return fail(
            f"The demo needs transformers: `pip install transformers` ({error})."
        )
    return show(
        Settings(
            parsed.dtype,
            parsed.batch_size,
            parsed.length,
            parsed.rounds,
            parsed.seed,
            parsed.tiny,
        )
    )
