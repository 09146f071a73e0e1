"""Commands that need no run of yours: `doctor`, `env`, `demo`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.text import error_line, printable
from ...guard.files.json_text import dumps
from .subcommand import Commands, add_command, at_least_one, command, fail, reason

if TYPE_CHECKING:
    from ..doctor.diagnosis import Diagnosis


# `doctor`: the machine, checked before a run.


@command(after="compare")
def add_doctor(commands: Commands) -> None:
    """Adds the command `doctor`."""
    parser = add_command(
        commands,
        "doctor",
        _run_doctor,
        "check ranks, collectives and arithmetic before a run",
        """
        doctor
        doctor --seconds 60 --json
        """,
        more=": [how](doctor.md#before-a-run-the-doctor)",
    )
    parser.description = (
        "Check ranks, collectives and arithmetic before a run. For several "
        "ranks: `torchrun --nproc-per-node 8 -m overflow_fast doctor`. Exit status: 0 "
        "fine, 1 a warning, 2 broken."
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="the limit of a stage (default: 30)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--backend", help="of the collectives (default: nccl or gloo)")


def _run_doctor(parsed: argparse.Namespace) -> int:
    from ..doctor.examination import Address, Examination
    from ..doctor.stage import ExaminationSettings

    if not parsed.seconds > 0:
        return fail(f"--seconds must be greater than 0, got {parsed.seconds:g}")
    settings = ExaminationSettings(limit=parsed.seconds, backend=parsed.backend)
    try:
        examination = Examination(Address.from_environment(), settings)
    except ValueError as error:
        return fail(f"The ranks cannot meet: {error}")
    diagnosis = examination.run()
    if examination.is_leader:
        _tell(diagnosis, parsed.json)
    examination.part()
    return diagnosis.status


def _tell(diagnosis: Diagnosis, as_json: bool) -> None:
    from .terminal import shown

    if as_json:
        print(dumps(diagnosis.to_dict(), indent=1))
    else:
        print(shown(str(diagnosis)))
    sys.stdout.flush()


# `env`: what a bug report needs.


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


@command(after="export")
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


# `demo`: a step that is nan, and a T5 that overflows.


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
