"""Facts about a rank that need no other rank: versions, device, memory, clocks."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

_QUERY = {
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "hw_slowdown": "clocks_throttle_reasons.hw_slowdown",
}
_SMI_SECONDS = 10


@dataclass(frozen=True)
class Facts:
    """A rank, as it describes itself.

    Attributes:
        host: The name of its host.
        pid: Its process.
        local_rank: `LOCAL_RANK`, or None.
        versions: Those of torch, NCCL, Python and overflow_fast.
        backend: The backend that it would use.
        gpu: The identity of its GPU, or "".
        kind: The kind of the device, by which results are compared.
        num_gpus: How many GPUs it sees.
        taken: The share of the GPU's memory that was taken before.
        smi: The values that nvidia-smi has for the GPU, by the names of `_QUERY`.
        waited: The seconds that it waited for all others.
    """

    host: str
    pid: int
    local_rank: int | None
    versions: Mapping[str, str]
    backend: str
    gpu: str = ""
    kind: str = ""
    num_gpus: int = 0
    taken: float = 0.0
    smi: Mapping[str, str] = field(default_factory=dict)
    waited: float = 0.0


def device_of_rank() -> torch.device:
    """Returns the GPU that `LOCAL_RANK` names, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    return torch.device("cuda", (local_rank() or 0) % count)


def local_rank() -> int | None:
    """Returns the environment's `LOCAL_RANK`, or that of SLURM."""
    text = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
    return int(text) if text.isdigit() else None


def backend_of(device: torch.device, asked: str | None) -> str:
    """Returns the backend of the collectives."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    return asked or ("nccl" if has_nccl else "gloo")


def facts_of(device: torch.device, asked: str | None) -> Facts:
    """Collects the facts of this rank. Initializes its GPU."""
    of_all = Facts(
        socket.gethostname(),
        os.getpid(),
        local_rank(),
        _versions(),
        backend_of(device, asked),
        kind=_processor(),
    )
    if device.type != "cuda":
        return of_all
    # Before anything of this process lies there.
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    identity = str(getattr(properties, "uuid", "")) or str(device)
    return dataclasses.replace(
        of_all,
        gpu=identity,
        kind=properties.name,
        num_gpus=torch.cuda.device_count(),
        taken=1 - free / total,
        smi=_ask_smi(identity),
    )


def _versions() -> dict[str, str]:
    from .. import __version__

    found = {
        "overflow_fast": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }
    if dist.is_nccl_available():
        from torch.cuda import nccl

        found["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _processor() -> str:
    """The kind of the CPU, as far as results of arithmetic depend on it."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _ask_smi(identity: str) -> dict[str, str]:
    """Asks nvidia-smi about a GPU; {} where it does not answer."""
    uuid = identity if identity.startswith("GPU-") else f"GPU-{identity}"
    command = [
        "nvidia-smi",
        f"--id={uuid}",
        f"--query-gpu={','.join(_QUERY.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return smi_values(done.stdout) if done.returncode == 0 else {}


def smi_values(text: str) -> dict[str, str]:
    """Reads the line that nvidia-smi prints of one GPU; leaves out what it lacks."""
    cells = [cell.strip() for cell in text.strip().split(",")]
    if len(cells) != len(_QUERY):
        return {}
    named = dict(zip(_QUERY, cells, strict=True))
    return {name: cell for name, cell in named.items() if not cell.startswith("[")}
