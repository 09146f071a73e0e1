"""Runs the stages of a rank in a process of their own, which is left where it hangs."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ...base.text import error_line
from .rendezvous import Address, connect, prefixed
from .roll_call import backend_of, device_of_rank
from .stage import ExaminationSettings, Stage, StageOutcome, StageSite

_START_SECONDS = 120.0  # for the imports of the process
_OF_LIMIT = 0.8  # collectives end before the stage is given up


class StageProcess:
    """A process that runs the stages of one rank, one after another.

    Args:
        address: Where this rank and the store are.
        settings: The settings.
        generation: The number of processes that this rank has given up.
    """

    def __init__(
        self, address: Address, settings: ExaminationSettings, generation: int
    ) -> None:
        context = multiprocessing.get_context(_start_method())
        self._pipe, other = context.Pipe()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(other, address, settings, generation), daemon=True
        )
        self._process.start()
        other.close()
        self._is_ready = False

    def run(self, stage: Stage, members: Sequence[int], limit: float) -> StageOutcome:
        """Runs a stage; returns how it ended, within the limit."""
        number, doing = 0, "the start of its process"
        try:
            if not self._is_ready and not self._pipe.poll(_START_SECONDS):
                return StageOutcome("hung", number, doing)
            self._is_ready = self._is_ready or self._pipe.recv() == "ready"
            self._pipe.send((stage.run, stage.needs_group, list(members)))
            deadline = time.monotonic() + limit
            while self._pipe.poll(max(0.0, deadline - time.monotonic())):
                kind, value = self._pipe.recv()
                if kind == "note":
                    number, doing = number + 1, value
                elif kind == "done":
                    return StageOutcome("done", number, doing, data=value)
                else:
                    return StageOutcome("error", number, doing, value)
            return StageOutcome("hung", number, doing)
        except (EOFError, OSError):
            self._process.join(_START_SECONDS)
            return StageOutcome(
                "died", number, doing, _exit_text(self._process.exitcode)
            )

    def end(self) -> None:
        """Ends the process, which may hang."""
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.kill()


def _start_method() -> str:
    # A fork has torch at once. This process has used neither CUDA nor OpenMP.
    return "fork" if sys.platform == "linux" else "spawn"


def _exit_text(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def serve(
    pipe: Connection, address: Address, settings: ExaminationSettings, generation: int
) -> None:
    """Runs the stages that come by a pipe, within the process, until it is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    pipe.send("ready")
    try:
        while True:
            run, needs_group, members = pipe.recv()
            try:
                device = device_of_rank()
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                site = StageSite(
                    *(address.rank, members, device, settings),
                    lambda text: pipe.send(("note", text)),
                )
                if needs_group and not dist.is_initialized():
                    _make_group(site, address, generation)
                pipe.send(("done", run(site)))
            except Exception as error:
                pipe.send(("error", error_line(error)))
    except (EOFError, OSError):
        os._exit(0)  # a group whose ranks are gone cannot be destroyed


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make_group(site: StageSite, address: Address, generation: int) -> None:
    site.note("the making of the process group")
    # Else NCCL ends the ranks that wait for another one, and not that one.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    store = connect(address.host, address.port, is_host=False)
    limit = datetime.timedelta(seconds=_OF_LIMIT * site.settings.limit)
    dist.init_process_group(
        backend_of(site.device, site.settings.backend),
        store=prefixed(f"{address.session}/group{generation}", store),
        rank=site.position,
        world_size=len(site.members),
        timeout=limit,
    )
