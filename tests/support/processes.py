"""Processes for tests, forked from a server that has imported torch already."""

import contextlib
import functools
import gc
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import torch.multiprocessing

# Importing these takes 2 to 5 s of a core; a fork of the server has them at once.
_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.utils.cpp_extension",
    "overflow_fast.guard.guard",
    "pytest",
]


@functools.cache
def start_method():
    """forkserver, spawn where there is none; starts nothing."""
    if "forkserver" not in torch.multiprocessing.get_all_start_methods():
        return "spawn"
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    return "forkserver"


def _fork_for_server(path, arguments, descriptors):
    """Stands for multiprocessing's start of a new Python that becomes the server."""
    if pid := os.fork():
        return pid
    try:
        for each in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the list itself is closed
                is_pipe = os.readlink(f"/proc/self/fd/{each}").startswith("pipe:")
                if is_pipe and each > 2 and each not in descriptors:
                    os.close(each)
        # pytest captures what is written to the former streams, and nothing of this.
        silence = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(silence, each)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        torch._logging._init_logs()
        gc.enable()
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def serve_from_here():
    """Makes the server a fork of this process, which has imported everything.

    To be called while no other thread of this process runs code.
    """
    if sys.platform == "linux":
        start_method()
        spawning = mock.patch.object(
            multiprocessing.util, "spawnv_passfds", _fork_for_server
        )
        with spawning:
            multiprocessing.forkserver.ensure_running()


def context():
    """The context of multiprocessing that starts the tests' processes."""
    return torch.multiprocessing.get_context(start_method())


def _run_as_main(arguments, cwd, environment, folder):
    gc.freeze()  # no collection looks at what the server has imported
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    # The loader of pytest, which has a plugin's package, runs no module as a program.
    sys.meta_path[:] = [e for e in sys.meta_path if "pytest" not in type(e).__module__]
    if arguments[0] == "-m":
        sys.argv, sys.path[:0] = list(arguments[1:]), [str(cwd)]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *arguments[2:]], [str(cwd)]
        exec(arguments[1], vars(sys.modules["__main__"]))
    else:
        sys.argv, sys.path[:0] = list(arguments), [str(Path(arguments[0]).parent)]
        runpy.run_path(arguments[0], run_name="__main__")


def python(*arguments, cwd=None, environment=None):
    """Runs a script, `-c` code or `-m` a module as Python would, forked of the server.

    Returns:
        Its returncode, stdout and stderr.
    """
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as name:
        folder, cwd = Path(name), Path(cwd or Path.cwd()).resolve()
        process = context().Process(
            target=_run_as_main, args=(arguments, cwd, environment, folder)
        )
        process.start()
        process.join()
        return types.SimpleNamespace(
            returncode=process.exitcode,
            stdout=(folder / "out").read_text(),
            stderr=(folder / "err").read_text(),
        )
