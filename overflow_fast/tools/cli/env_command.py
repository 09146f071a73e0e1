"""The command `env`: what a bug report needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from ...base.text import error_line, printable
from ...guard.files.json_text import dumps
from .subcommand import Commands, add_command, command

_LIBRARIES = (
    *(
        "transformers",
        "peft",
        "torchao",
        "bitsandbytes",
        "safetensors",
        "numpy",
        "pandas",
        "pyarrow",
    ),
    *("tensorboard", "prometheus_client", "wandb", "mlflow", "mlflow-skinny", "rich"),
)
_PREFIXES = ("OVERFLOW_FAST_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF")


@command(after="doctor")
def add_env(commands: Commands) -> None:
    """Adds the command `env`."""
    parser = add_command(
        commands,
        "env",
        _run_env,
        "print what a bug report needs: versions, kernels, devices, libraries",
        "env --json",
        more="; `--version` prints versions alone, and says if no extension fits",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_env(parsed: argparse.Namespace) -> int:
    found = environment()
    if parsed.json:
        print(dumps(found, indent=1))
        return 0
    for name, value in found.items():
        print(printable(f"{name}: {_text(value)}"))
    return 0


def environment() -> dict[str, Any]:
    """Collects versions, kernels, devices and libraries, as JSON has them."""
    import torch

    from ... import __version__
    from ..torch_settings import settings_of_torch

    return {
        "overflow_fast": __version__,
        "kernels": _kernels(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": _gpus(),
        "mps": torch.backends.mps.is_available(),
        "distributed": _backends(),
        "settings": settings_of_torch(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "libraries": _libraries(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
        "torch_config": torch.__config__.show().strip().splitlines(),
    }


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


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        f"{found.name}, {found.total_memory / 2**30:.0f} GiB, "
        f"compute capability {found.major}.{found.minor}"
        for found in map(
            torch.cuda.get_device_properties, range(torch.cuda.device_count())
        )
    ]


def _backends() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in names if dist.is_backend_available(name)]


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.machine())


def _libraries() -> dict[str, str]:
    from ...guard.libraries import PACKAGES

    found = {}
    for name in (*PACKAGES, *_LIBRARIES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return str(value)
