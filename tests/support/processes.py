"""Processes for tests, forked from a server that has imported torch already."""

import functools
import gc
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path

import torch.multiprocessing

# Importing these takes 2 to 5 s of a core; a fork of the server has them at once.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.utils.cpp_extension",
    "overflow_fast",
    "pytest",
]


@functools.cache
def start_method():
    """forkserver, spawn where there is none; starts nothing."""
    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return "spawn"
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    return "forkserver"


def context():
    """The context of multiprocessing that starts the tests' processes."""
    return torch.multiprocessing.get_context(start_method())


def _run_as_main(arguments, cwd, environment, folder, is_finalized):
    gc.freeze()  # no collection looks at what the server has imported
    if is_finalized:
        os._exit = sys.exit  # which multiprocessing calls in the end
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if arguments[0] == "-m":
        sys.argv, sys.path[:0] = list(arguments[1:]), [str(cwd)]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *arguments[2:]], [str(cwd)]
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[:0] = list(arguments), [str(Path(arguments[0]).parent)]
        runpy.run_path(arguments[0], run_name="__main__")


def python(*arguments, cwd=None, environment=None, is_finalized=False):
    """Runs a script, `-c` code or `-m` a module as Python would, forked of the server.

    Args:
        is_finalized: The interpreter ends as that of a program does: modules are
            cleared, and so on. A fork just exits, else.

    Returns:
        Its returncode, stdout and stderr.
    """
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as name:
        folder, cwd = Path(name), Path(cwd or Path.cwd()).resolve()
        process = context().Process(
            target=_run_as_main,
            args=(arguments, cwd, environment, folder, is_finalized),
        )
        process.start()
        process.join()
        return types.SimpleNamespace(
            returncode=process.exitcode,
            stdout=(folder / "out").read_text(),
            stderr=(folder / "err").read_text(),
        )
