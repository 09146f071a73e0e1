"""The command line: `python -m overflow_fast demo|run|explain|report`."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence

from .core.strict_json import to_plain


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overflow_fast",
        description="The numerics flight recorder that PyTorch users leave on.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="watch a T5 overflow, with transformers' detector and with this"
    )
    demo.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16"
    )
    demo.add_argument("--batch-size", type=int, default=4, help="texts in a batch")
    demo.add_argument("--length", type=int, default=128, help="bytes of each text")
    demo.add_argument("--rounds", type=int, default=7, help="how often to time")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--tiny", action="store_true", help="a small model, for a try")

    explain = commands.add_parser(
        "explain", help="explain a bad step from the folder of its evidence"
    )
    explain.add_argument(
        "folder", help="the folder, such as evidence/.../step-00000012"
    )
    explain.add_argument(
        "--model",
        required=True,
        metavar="FILE.py:FUNCTION",
        help="a function that returns the model with the weights of the step",
    )
    explain.add_argument(
        "--loss",
        metavar="FILE.py:FUNCTION",
        help="a function that takes the model and the batch and returns the loss",
    )
    explain.add_argument(
        "--any-weights", action="store_true", help="explain with other weights, too"
    )
    explain.add_argument("--json", action="store_true", help="print JSON")

    report = commands.add_parser(
        "report", help="write a page of flight records and evidence"
    )
    report.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a flight record (one of each rank), or a folder of evidence",
    )
    report.add_argument(
        "-o", dest="output", default="run.html", help="the page (default: run.html)"
    )

    run = commands.add_parser(
        "run", help="run a program whose Trainer(debug=...) shall use this detector"
    )
    run.add_argument(
        "-m", dest="is_module", action="store_true", help="PROGRAM is a module's name"
    )
    run.add_argument("program", help="a script's path, or a module's name after -m")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def _version() -> str:
    import torch

    from . import _C, __version__

    cuda = "CUDA kernels" if _C.has_kernels("cuda") else "no CUDA kernels"
    torch_version = f"torch {torch.__version__}"
    return f"overflow_fast {__version__}, {torch_version}, CPU {_C.isa()}, {cuda}"


def _run(program: str, arguments: Sequence[str], is_module: bool) -> None:
    from .integrations.transformers import install

    install()
    sys.argv = [program, *arguments]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(program):
        sys.exit(f"program must be a script or a folder with __main__.py: {program}")
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")


def _explain(parsed: argparse.Namespace) -> int:
    from .replay.offline import explain_folder, function_at
    from .replay.saved_step import UnreadableStepError

    try:
        model = function_at("--model", parsed.model)()
        loss = None if parsed.loss is None else function_at("--loss", parsed.loss)
        found = explain_folder(
            parsed.folder, model, loss, any_weights=parsed.any_weights
        )
    except UnreadableStepError as error:
        print(f"The step cannot be explained: {error}.", file=sys.stderr)
        return 2
    print(json.dumps(to_plain(found.to_dict()), indent=1) if parsed.json else found)
    return 0


def _report(paths: Sequence[str], output: str) -> int:
    from .page.sources import write_report

    try:
        print(write_report(paths, output))
    except (OSError, ValueError) as error:
        print(f"The page cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    parsed = _parser().parse_args(arguments)
    if parsed.command == "run":
        _run(parsed.program, parsed.arguments, parsed.is_module)
        return 0
    if parsed.command == "explain":
        return _explain(parsed)
    if parsed.command == "report":
        return _report(parsed.paths, parsed.output)
    try:
        from .demo import Settings, show
    except ImportError as error:
        print(
            f"The demo needs transformers: `pip install transformers` ({error}).",
            file=sys.stderr,
        )
        return 2
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


if __name__ == "__main__":
    sys.exit(main())
