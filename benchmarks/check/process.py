"""Runs a command within its limit, and leaves no process of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 2.0  # seconds between the request to end and the end


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM: the running stage is ended, the summary still written."""


class Ended(NamedTuple):
    """How a command ended: its exit status, negative for a signal."""

    code: int
    seconds: float
    was_cut_off: bool


def raise_on_signals() -> None:
    """Makes the first SIGINT or SIGTERM raise `Interrupted`; ignores later ones."""

    def handle(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, handle)


def run(
    command: Sequence[str],
    log: Path,
    seconds: float,
    cwd: Path,
    environment: Mapping[str, str],
) -> Ended:
    """Runs a command in a process group of its own, whose output is appended to `log`.

    Args:
        command: The program and its arguments.
        log: A file; what the command prints is in it as soon as it is printed.
        seconds: When the whole group is ended.
        cwd: Its working directory.
        environment: Its environment.

    Raises:
        OSError: The program cannot be started.
        Interrupted: On a signal, after the group was ended.
    """
    begin = time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=dict(environment),
            start_new_session=True,
        )
    was_cut_off = False
    try:
        was_cut_off = not _exits_within(process, seconds)
    finally:
        _end_group(process)
    return Ended(process.wait(), time.monotonic() - begin, was_cut_off)


def _exits_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits without reaping: until then nobody else can get the group's number."""
    deadline = time.monotonic() + seconds
    flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
    while os.waitid(os.P_PID, process.pid, flags) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _end_group(process: subprocess.Popen[bytes]) -> None:
    if not _exits_within(process, 0):
        os.killpg(process.pid, signal.SIGTERM)
        _exits_within(process, GRACE)
    os.killpg(process.pid, signal.SIGKILL)
