"""Runs stages in a process of their own, which is given up where it hangs."""

from __future__ import annotations

import contextlib
import datetime
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .facts import backend_of, device_of_rank
from .meeting import Address, connect, prefixed
from .nccl_log import ask_nccl_for_a_log, network_in, warnings_in
from .stage import Outcome, Settings, Site, Stage

_START_SECONDS = 120.0  # for the imports of the process
_OF_LIMIT = 0.8  # collectives end before the stage is given up


class StageProcess:
    """A process that runs the stages of one rank, one after another.

    Args:
        address: Where this rank and the store are.
        settings: The settings.
        generation: The number of processes that this rank has given up.
    """

    def __init__(self, address: Address, settings: Settings, generation: int) -> None:
        context = multiprocessing.get_context(_start_method())
        self._pipe, other = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(other, address, settings, generation), daemon=True
        )
        self._process.start()
        other.close()
        self._is_ready = False

    def run(
        self,
        stage: Stage,
        members: Sequence[int],
        hosts: Mapping[int, str],
        limit: float,
    ) -> Outcome:
        """Runs a stage; returns how it ended, within the limit."""
        number, doing = 0, "the start of its process"
        try:
            if not self._is_ready and not self._pipe.poll(_START_SECONDS):
                return self._given_up(number, doing)
            self._is_ready = self._is_ready or self._pipe.recv() == "ready"
            self._pipe.send((stage, list(members), dict(hosts)))
            deadline = time.monotonic() + limit
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, value = self._pipe.recv()
                if kind == "note":
                    number, doing = number + 1, value
                elif kind == "done":
                    return Outcome("done", number, doing, data=value)
                else:
                    return Outcome("error", number, doing, value)
            return self._given_up(number, doing)
        except (EOFError, OSError):
            self._process.join(_START_SECONDS)
            return Outcome("died", number, doing, _exit_text(self._process.exitcode))

    def _given_up(self, number: int, doing: str) -> Outcome:
        is_stopped = _state_of(self._process.pid) == "T"
        detail = "stopped by a signal, such as SIGSTOP" if is_stopped else ""
        return Outcome("stopped" if is_stopped else "hung", number, doing, detail)

    def end(self) -> None:
        """Ends the process, which may hang."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.kill()


def _start_method() -> str:
    # A fork has torch at once. This process has used neither CUDA nor OpenMP.
    return "fork" if sys.platform == "linux" else "spawn"


def _state_of(pid: int | None) -> str:
    """The state of a process by Linux's `/proc`: "T" is stopped; "" elsewhere."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


# In the process.


def serve(
    pipe: Connection, address: Address, settings: Settings, generation: int
) -> None:
    """Runs the stages that come by a pipe, until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # A planted nan is no alarm.
    logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
    log = ask_nccl_for_a_log(address.session, address.rank)
    pipe.send("ready")
    try:
        while True:
            stage, members, hosts = pipe.recv()
            try:
                site = _site(pipe, address, settings, members, hosts, log)
                if stage.needs_group and not dist.is_initialized():
                    _make_group(site, address, generation)
                pipe.send(("done", stage.run(site)))
            except Exception as error:
                said = warnings_in(_text_of(log))
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                pipe.send(("error", f"{text} (NCCL: {said})" if said else text))
    except (EOFError, OSError):
        with contextlib.suppress(OSError):
            if log is not None:
                log.unlink()
        os._exit(0)  # a group whose ranks are gone cannot be destroyed


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _site(
    pipe: Connection,
    address: Address,
    settings: Settings,
    members: Sequence[int],
    hosts: Mapping[int, str],
    log: Path | None,
) -> Site:
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def note(text: str) -> None:
        pipe.send(("note", text))

    return Site(
        *(address.rank, members, hosts, device, settings, note, address.session),
        lambda: network_in(_text_of(log)),
    )


def _make_group(site: Site, address: Address, generation: int) -> None:
    site.note("the making of the process group")
    store: Any = connect(address.host, address.port, is_host=False)
    backend = backend_of(site.device, site.settings.backend)
    limit = datetime.timedelta(seconds=_OF_LIMIT * site.settings.limit)
    dist.init_process_group(
        backend,
        store=prefixed(f"{address.session}/group{generation}", store),
        rank=site.position,
        world_size=len(site.members),
        timeout=limit,
    )


def _text_of(log: Path | None) -> str:
    try:
        return "" if log is None else log.read_text(errors="replace")
    except OSError:
        return ""
