"""Reads what NCCL says with `NCCL_DEBUG`, so that users need not. Pure functions."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

_NETWORK = re.compile(r"NCCL INFO .*Using network (.+?)\s*$", re.MULTILINE)
_WARNING = re.compile(r"NCCL WARN (.+?)\s*$", re.MULTILINE)
_MOST_WARNINGS = 2


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
