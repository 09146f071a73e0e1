"""The command `env`: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from typing import Any

from ...base.text import error_line, printable
from .subcommand import Commands, add_command, command

_LIBRARIES = ("transformers", "peft", "bitsandbytes", "safetensors", "pandas")
_PREFIXES = ("OVERFLOW_FAST_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")


@command(after="doctor")
def add_env(commands: Commands) -> None:
    """Adds the command `env`."""
    add_command(
        commands,
        "env",
        _run_env,
        "print what a bug report needs: versions, kernels, devices, libraries",
        "env",
        more="; `--version` prints versions alone, and says if no extension fits",
    )


def _run_env(parsed: argparse.Namespace) -> int:
    from torch.utils import collect_env

    from ... import __version__

    own: dict[str, dict[str, Any]] = {
        "kernels": _kernels(),
        "libraries": _libraries(),
        "variables": _variables(),
    }
    print(f"overflow_fast: {__version__}")
    for name, value in own.items():
        text = ", ".join(f"{key} {each}" for key, each in value.items())
        print(printable(f"{name}: {text or 'none'}"))
    torch_s = collect_env.get_pretty_env_info()  # type: ignore[no-untyped-call]
    print(printable(torch_s, keep="\n"))
    return 0


def _kernels() -> dict[str, Any]:
    try:
        from ... import _C
    except ImportError as error:
        return {"error": " ".join(str(error).splitlines())}
    found = {kind: _C.has_kernels(kind) for kind in ("cuda", "mps")}
    return {"cpu": _C.isa(), **found, **_unused_kernels(found["cuda"])}


def _unused_kernels(has_kernels: bool) -> dict[str, str]:
    """Returns why the kernels that there are do not serve some GPU."""
    import torch

    from ... import _C
    from ...scanner import callbacks  # noqa: F401  (the check logs what it finds)

    devices = range(torch.cuda.device_count()) if has_kernels else ()
    failed = {}
    for index in devices:
        try:
            _C.check_kernels(f"cuda:{index}")
        except Exception as error:
            failed[f"cuda:{index}"] = f"not checked ({error_line(error)})"
    unused = {
        device: f"torch operations ({why})"
        for device, why in _C.unused_kernels().items()
    }
    return {**unused, **failed}


def _libraries() -> dict[str, str]:
    from ...guard.libraries import PACKAGES

    found = {}
    for name in (*PACKAGES, *_LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _variables() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
