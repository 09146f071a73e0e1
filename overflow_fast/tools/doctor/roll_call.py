"""The roll call: what ranks say of themselves, and what does not fit."""

from __future__ import annotations

import collections
import os
import platform
import socket
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ...base.majority import odd_ones
from ...base.text import capitalized, counted, numbered, some
from ..torch_settings import settings_of_torch
from .stage import BROKEN, WARNING, Finding, Hosts, Stage, StageSite, named

NAME = "roll call"


@dataclass(frozen=True)
class RankFacts:
    """A rank, as it describes itself.

    Attributes:
        host: The name of its host.
        pid: Its process.
        local_rank: `LOCAL_RANK`, or None.
        versions: Those of torch, NCCL, Python, overflow_fast and the GPU's driver.
        backend: The backend that it would use.
        gpu: The identity of its GPU, or "".
        num_gpus: How many GPUs it sees.
        environment: Variables and switches that change results or speed.
    """

    host: str
    pid: int
    local_rank: int | None
    versions: Mapping[str, str]
    backend: str
    gpu: str = ""
    num_gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


_PREFIXES = ("NCCL_", "OMP_", "MKL_", "CUBLAS_", "CUDA_", "CUDNN_", "TORCH_", "NVIDIA_")
# Made different by launchers, or known to name a rank's device.
_OWN = ("NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def _environment() -> dict[str, str]:
    found = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not name.startswith(_OWN)
    }
    return found | {name: str(each) for name, each in settings_of_torch().items()}


def device_of_rank() -> torch.device:
    """Returns the GPU that `LOCAL_RANK` names, or the CPU where there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return torch.device("cpu")
    return torch.device("cuda", (local_rank() or 0) % count)


def local_rank() -> int | None:
    """Returns the environment's `LOCAL_RANK`, or that of SLURM."""
    return number_of("LOCAL_RANK", "SLURM_LOCALID")


def number_of(*names: str) -> int | None:
    """Returns the first of some variables of the environment that holds a number."""
    texts = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def backend_of(device: torch.device, asked: str | None) -> str:
    """Returns the backend of the collectives."""
    has_nccl = device.type == "cuda" and dist.is_nccl_available()
    return asked or ("nccl" if has_nccl else "gloo")


def kind_of(device: torch.device) -> str:
    """Returns the kind of a device, as far as results of arithmetic depend on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _run(site: StageSite) -> RankFacts:
    is_cuda = site.device.type == "cuda"
    return RankFacts(
        socket.gethostname(),
        os.getpid(),
        local_rank(),
        _versions(is_cuda),
        backend_of(site.device, site.settings.backend),
        _identity(site.device) if is_cuda else "",
        torch.cuda.device_count() if is_cuda else 0,
        _environment(),
    )


def _identity(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", "")) or str(device)


def _versions(is_cuda: bool) -> dict[str, str]:
    from torch.utils import collect_env

    from ... import __version__

    found = {
        "overflow_fast": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "CUDA": str(torch.version.cuda),
    }
    if dist.is_nccl_available():
        from torch.cuda import nccl

        found["NCCL"] = ".".join(map(str, nccl.version()))  # type: ignore[no-untyped-call]
    if is_cuda:
        found["GPU driver"] = str(
            collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
        )
    return found


def missing(absent: Sequence[int], world: int, limit: float) -> list[Finding]:
    """Names the ranks that did not come within the limit."""
    if not absent:
        return []
    text = (
        f"{capitalized(named(absent, {}))} of {world} did not come within {limit:g} s: "
        "look for their processes and hosts, and whether these reach the store at "
        "MASTER_ADDR and MASTER_PORT."
    )
    return [Finding(NAME, BROKEN, tuple(absent), text)]


def _judge(facts: Mapping[int, RankFacts], hosts: Hosts) -> list[Finding]:
    return [*_unlike(facts, hosts), *_doubles(facts), *_beyond(facts, hosts)]


_DOUBTFUL = ("GPU driver", "Python")  # others differ, and ranks may work together


def _unlike(facts: Mapping[int, RankFacts], hosts: Hosts) -> Iterator[Finding]:
    """Versions, backends, variables and switches that are not the same on all ranks."""
    has = {rank: {**f.versions, "backend": f.backend} for rank, f in facts.items()}
    for name in sorted({name for each in has.values() for name in each}):
        values = {rank: each.get(name, "unknown") for rank, each in has.items()}
        severity = WARNING if name in _DOUBTFUL else BROKEN
        yield from _differing(name, severity, values, hosts)
    for name in sorted({name for each in facts.values() for name in each.environment}):
        values = {r: each.environment.get(name, "unset") for r, each in facts.items()}
        yield from _differing(name, WARNING, values, hosts)


def _differing(
    name: str, severity: int, values: Mapping[int, Hashable], hosts: Hosts
) -> Iterator[Finding]:
    odd = odd_ones(values)
    if odd is None:
        return
    most, ranks = odd
    theirs = ", ".join(sorted({str(values[rank]) for rank in ranks}))
    text = f"{name} is {theirs} on {named(ranks, hosts)}, and {most} on the others."
    if most is None:
        holders = collections.defaultdict[Hashable, list[int]](list)
        for rank, value in values.items():
            holders[value].append(rank)
        shown = [f"{value} on {named(of, hosts)}" for value, of in holders.items()]
        text = f"The ranks differ in {name}: {some(shown, 4)}."
    yield Finding(NAME, severity, tuple(ranks), text)


def _doubles(facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    """Ranks that share a GPU, or the number on their host."""
    owners = collections.defaultdict[tuple[str, str], list[int]](list)
    for rank, each in facts.items():
        if each.gpu:
            owners[f"GPU {each.gpu}", each.host].append(rank)
        elif each.local_rank is not None:
            owners[f"LOCAL_RANK {each.local_rank}", each.host].append(rank)
    for (what, host), ranks in owners.items():
        if len(ranks) > 1:
            text = (
                f"{numbered('Rank', ranks)} have the same {what} on {host}: each needs "
                "its own."
            )
            yield Finding(NAME, BROKEN, tuple(ranks), text)


def _beyond(facts: Mapping[int, RankFacts], hosts: Hosts) -> Iterator[Finding]:
    for rank, each in facts.items():
        if each.num_gpus and (each.local_rank or 0) >= each.num_gpus:
            text = (
                f"{capitalized(named([rank], hosts))}: LOCAL_RANK is "
                f"{each.local_rank}, and it sees {counted(each.num_gpus, 'GPU')} "
                "(CUDA_VISIBLE_DEVICES)."
            )
            yield Finding(NAME, BROKEN, (rank,), text)


ROLL_CALL = Stage(NAME, _run, _judge, needs_group=False)
