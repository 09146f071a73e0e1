"""The roll call: what ranks say of themselves, and what does not fit."""

from __future__ import annotations

import collections
import dataclasses
import os
import platform
import re
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from ...base.text import capitalized, counted, numbered
from ..torch_settings import settings_of_torch
from .stage import (
    BROKEN,
    WARNING,
    ExaminationSettings,
    Finding,
    Stage,
    StageSite,
    hosts_of,
    named,
    odd_ones,
)

# Facts about a rank that need no other rank: versions, device, memory, clocks.


_QUERY = {
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "hw_slowdown": "clocks_throttle_reasons.hw_slowdown",
}
_SMI_SECONDS = 10  # for a tool of the driver, which may hang; chosen


@dataclass(frozen=True)
class RankFacts:
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
        environment: Variables and switches that change results or speed.
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
    environment: Mapping[str, str] = field(default_factory=dict)


_PREFIXES = ("NCCL_", "OMP_", "MKL_", "CUBLAS_", "CUDA_", "CUDNN_", "TORCH_", "NVIDIA_")
# Made different by launchers or by the doctor itself, or known to name a rank's device.
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


def facts_of(device: torch.device, asked: str | None) -> RankFacts:
    """Collects the facts of this rank. Initializes its GPU."""
    of_all = RankFacts(
        socket.gethostname(),
        os.getpid(),
        local_rank(),
        _package_versions(),
        backend_of(device, asked),
        kind=_processor(),
        environment=_environment(),
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


def _package_versions() -> dict[str, str]:
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


NAME = "roll call"
_MOST_TAKEN = 0.1  # of a GPU's memory, before a run begins


def _run(site: StageSite) -> RankFacts:
    return facts_of(site.device, site.settings.backend)


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


def judge(
    facts: Mapping[int, RankFacts], settings: ExaminationSettings
) -> list[Finding]:
    """Finds what does not fit among the facts of ranks."""
    hosts = hosts_of(facts)
    return [
        *_versions(facts, hosts),
        *_environments(facts, hosts),
        *_doubles(facts, hosts),
        *_devices(facts, hosts),
        *_late(facts, settings, hosts),
    ]


def _versions(
    facts: Mapping[int, RankFacts], hosts: Mapping[int, str]
) -> Iterator[Finding]:
    names = {name for each in facts.values() for name in each.versions}
    drivers = {rank: each.smi.get("driver") for rank, each in facts.items()}
    columns: dict[str, Mapping[int, object]] = {
        name: {rank: each.versions.get(name) for rank, each in facts.items()}
        for name in sorted(names)
    }
    columns["GPU driver"] = drivers
    columns["backend"] = {rank: each.backend for rank, each in facts.items()}
    for name, values in columns.items():
        odd = odd_ones(values)
        if odd is None:
            continue
        severity = WARNING if name in ("GPU driver", "Python") else BROKEN
        yield Finding(NAME, severity, tuple(odd[1]), _odd(name, values, odd, hosts))


def _environments(
    facts: Mapping[int, RankFacts], hosts: Mapping[int, str]
) -> Iterator[Finding]:
    """Variables and switches that are not the same on all ranks."""
    for name in sorted({name for each in facts.values() for name in each.environment}):
        values = {r: each.environment.get(name, "unset") for r, each in facts.items()}
        odd = odd_ones(values)
        if odd is not None:
            yield Finding(NAME, WARNING, tuple(odd[1]), _odd(name, values, odd, hosts))


def _odd(
    name: str,
    values: Mapping[int, object],
    odd: tuple[object, list[int]],
    hosts: Mapping[int, str],
) -> str:
    most, ranks = odd
    if most is None:
        counts = collections.Counter(values.values())
        holders = {v: [r for r in values if values[r] == v] for v in counts}
        shown = ", ".join(
            f"{value} on {named(holders[value], hosts)}"
            for value, _ in counts.most_common(4)
        )
        return f"The ranks differ in {name}: {shown}."
    theirs = ", ".join(sorted({str(values[rank]) for rank in ranks}))
    return f"{name} is {theirs} on {named(ranks, hosts)}, and {most} on the others."


def _doubles(
    facts: Mapping[int, RankFacts], hosts: Mapping[int, str]
) -> Iterator[Finding]:
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


def _devices(
    facts: Mapping[int, RankFacts], hosts: Mapping[int, str]
) -> Iterator[Finding]:
    for rank, each in facts.items():
        who, number = capitalized(named([rank], hosts)), each.local_rank
        for severity, text in (
            (BROKEN, _wrong_device(each, number)),
            (WARNING, _memory(each)),
            (BROKEN, _ecc(each)),
            (WARNING, _slowdown(each)),
        ):
            if text:
                yield Finding(NAME, severity, (rank,), f"{who}: {text}.")


def _wrong_device(facts: RankFacts, number: int | None) -> str:
    if not facts.num_gpus or number is None or number < facts.num_gpus:
        return ""
    return (
        f"LOCAL_RANK is {number}, and it sees {counted(facts.num_gpus, 'GPU')} "
        "(CUDA_VISIBLE_DEVICES)"
    )


def _memory(facts: RankFacts) -> str:
    if facts.taken <= _MOST_TAKEN:
        return ""
    return f"{facts.taken:.0%} of the GPU's memory is taken already"


def _ecc(facts: RankFacts) -> str:
    errors = facts.smi.get("ecc_errors", "0")
    if errors in ("0", "N/A"):
        return ""
    return f"the GPU has {errors} uncorrected ECC errors"


def _slowdown(facts: RankFacts) -> str:
    if facts.smi.get("hw_slowdown") != "Active":
        return ""
    clock, most = facts.smi.get("clock_mhz", "?"), facts.smi.get("max_clock_mhz", "?")
    return f"the GPU slows down for heat or power (clock {clock} of {most} MHz)"


def _late(
    facts: Mapping[int, RankFacts],
    settings: ExaminationSettings,
    hosts: Mapping[int, str],
) -> Iterator[Finding]:
    waited = {rank: each.waited for rank, each in facts.items()}
    for rank, seconds in late_ranks(waited, settings.late).items():
        text = (
            f"{capitalized(named([rank], hosts))} came {seconds:.0f} s after half of "
            "the ranks."
        )
        yield Finding(NAME, WARNING, (rank,), text)


def late_ranks(waited: Mapping[int, float], late: float) -> dict[int, float]:
    """Finds the ranks that came last, by how long each has waited for all others.

    No clocks are compared: a rank that comes late has waited less.

    Args:
        waited: The seconds that each rank has waited.
        late: The seconds after the median that are allowed.

    Returns:
        The seconds after the median, by rank.
    """
    if len(waited) < 2:
        return {}
    middle = statistics.median_high(waited.values())
    return {r: middle - each for r, each in waited.items() if middle - each > late}


ROLL_CALL = Stage(NAME, _run, judge, needs_group=False)


# Reads what NCCL says with `NCCL_DEBUG`, so that users need not. Pure functions.


_NETWORK = re.compile(r"NCCL INFO .*Using network (.+?)\s*$", re.MULTILINE)
_WARNING = re.compile(r"NCCL WARN (.+?)\s*$", re.MULTILINE)
_MOST_WARNINGS = 2  # in a cell of a table; chosen


def ask_nccl_for_a_log(session: str, rank: int) -> Path | None:
    """Makes NCCL write a log; None where the user has chosen what it writes.

    Has to be called before NCCL is used in this process.
    """
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return None
    path = Path(tempfile.gettempdir()) / f"overflow_fast_nccl_{session}_{rank}.log"
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET"
    os.environ["NCCL_DEBUG_FILE"] = str(path)
    return path


def network_in(text: str) -> str:
    """Returns the network that NCCL uses between hosts, such as "IB" or "Socket"."""
    found: list[str] = _NETWORK.findall(text)
    return found[-1] if found else ""


def warnings_in(text: str) -> str:
    """Returns NCCL's first warnings, or ""."""
    found = list(dict.fromkeys(_WARNING.findall(text)))
    return "; ".join(found[:_MOST_WARNINGS])


def slow_network(networks: Mapping[int, str], num_hosts: int) -> str:
    """Returns a sentence if NCCL uses sockets between hosts, else ""."""
    if num_hosts < 2 or not all(each == "Socket" for each in networks.values()):
        return ""
    return (
        "NCCL uses sockets between hosts, and no InfiniBand or RoCE: it has found no "
        "such network, or no plugin for the one there is."
    )
