"""Examines the ranks stage by stage, each in a process that is left where it hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..text import error_line
from .checks import AGREEMENT, ARITHMETIC, BARRIER, COLLECTIVES, STORAGE
from .diagnosis import Diagnosis
from .links import LINKS
from .rendezvous import Address, Rendezvous, connect, prefixed
from .roll_call import (
    ROLL_CALL,
    ask_nccl_for_a_log,
    backend_of,
    device_of_rank,
    missing,
    network_in,
    warnings_in,
)
from .stage import (
    BROKEN,
    STATES,
    UNJUDGED,
    ExaminationSettings,
    Finding,
    Site,
    Stage,
    StageOutcome,
    StageResult,
    capital,
    hosts_of,
    named,
)

# The ranks that did not come out of a stage. Pure functions.


_GONE = {
    "silent": "gave no answer: the process or its host is gone, frozen, or without a "
    "network",
    "died": "died",
    "stopped": "is frozen",
}


def lost_ranks(
    stage: str, outcomes: Mapping[int, StageOutcome], hosts: Mapping[int, str]
) -> tuple[list[Finding], list[int]]:
    """Names the ranks that keep a stage from ending.

    A rank that is gone explains why others wait for it. If none is, those are named
    that stand before what the others wait in.

    Args:
        stage: Its name.
        outcomes: The outcome of each rank that took part.
        hosts: The names of their hosts.

    Returns:
        The findings, and the ranks that must not take part any more.
    """
    gone = [rank for rank, each in outcomes.items() if each.state in _GONE]
    if gone:
        return [_gone(stage, rank, outcomes[rank], hosts) for rank in gone], gone
    stuck = {r: each for r, each in outcomes.items() if each.state != "done"}
    if not stuck:
        return [], []
    least = min(each.number for each in stuck.values())
    behind = [rank for rank, each in stuck.items() if each.number == least]
    # Others leave a collective by its timeout: who is still inside then keeps them.
    inside = [rank for rank in behind if outcomes[rank].state == "hung"]
    behind = inside or behind
    return [_stuck(stage, behind, outcomes, hosts)], behind


def _gone(
    stage: str, rank: int, outcome: StageOutcome, hosts: Mapping[int, str]
) -> Finding:
    why = f" ({outcome.detail})" if outcome.detail else ""
    where = f", in {outcome.doing}" if outcome.doing else ""
    text = f"{named([rank], hosts)} {_GONE[outcome.state]}{why}{where}."
    return Finding(stage, BROKEN, (rank,), capital(text))


def _stuck(
    stage: str,
    behind: Sequence[int],
    outcomes: Mapping[int, StageOutcome],
    hosts: Mapping[int, str],
) -> Finding:
    first = outcomes[behind[0]]
    # A collective that the others leave by its timeout is no reason of its own.
    errors = list(dict.fromkeys(outcomes[r].detail for r in behind))
    why = "".join(f": {text}" for text in errors[:2] if text)
    who = named(behind, hosts)
    if len(behind) == len(outcomes) > 1:
        text = f"No rank came out of {first.doing}{why}."
        return Finding(stage, BROKEN, (), capital(text))
    others = ""
    ahead = [each for rank, each in outcomes.items() if rank not in behind]
    if ahead and all(each.state == "done" for each in ahead):
        others = "; the others did"
    elif ahead:
        others = f"; the others wait in {max(ahead, key=lambda a: a.number).doing}"
    left = [rank for rank, each in outcomes.items() if each.state == "error"]
    if first.state == "hung" and left and not others.startswith("; the others did"):
        others = f"; {named(left, {})} left with an error: {outcomes[left[0]].detail}"
    text = f"{who} did not come out of {first.doing}{others}{why}."
    for rank in behind[:_MOST_STACKS]:
        if outcomes[rank].stack:
            text += f" Rank {rank} was at {outcomes[rank].stack}."
    return Finding(stage, BROKEN, tuple(behind), capital(text))


_MOST_STACKS = 2


# Runs stages in a process of their own, which is given up where it hangs.


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
        self._stacks = _stacks_file(address, self._process.pid)
        other.close()
        self._is_ready = False

    def run(
        self,
        stage: Stage,
        members: Sequence[int],
        hosts: Mapping[int, str],
        limit: float,
    ) -> StageOutcome:
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
                    return StageOutcome("done", number, doing, data=value)
                else:
                    return StageOutcome("error", number, doing, value)
            return self._given_up(number, doing)
        except (EOFError, OSError):
            self._process.join(_START_SECONDS)
            return StageOutcome(
                "died", number, doing, _exit_text(self._process.exitcode)
            )

    def _given_up(self, number: int, doing: str) -> StageOutcome:
        is_stopped = _state_of(self._process.pid) == "T"
        detail = "stopped by a signal, such as SIGSTOP" if is_stopped else ""
        stack = "" if is_stopped else self._stack()
        state = "stopped" if is_stopped else "hung"
        return StageOutcome(state, number, doing, detail, stack=stack)

    def _stack(self) -> str:
        """Asks the process where it is; it answers though its main thread hangs."""
        if not hasattr(signal, "SIGUSR1") or self._process.pid is None:
            return ""
        with contextlib.suppress(OSError):
            if not self._stacks.exists():
                return ""  # it has not begun, and the signal would end it
            os.kill(self._process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + _STACK_SECONDS
            while time.monotonic() < deadline:
                time.sleep(0.05)
                if found := innermost_calls(self._stacks.read_text()):
                    return found
        return ""

    def end(self) -> None:
        """Ends the process, which may hang."""
        with contextlib.suppress(OSError):
            self._stacks.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.kill()


_STACK_SECONDS = 2.0
_MOST_CALLS = 3
_CALL = re.compile(r'^  File "(.+)", line (\d+) in (\S+)', re.MULTILINE)


def _stacks_file(address: Address, pid: int | None) -> Path:
    name = f"overflow_fast_doctor_{address.session}_{address.rank}_{pid}.stack"
    return Path(tempfile.gettempdir()) / name


def innermost_calls(text: str) -> str:
    """The innermost calls of the main thread in what faulthandler has written."""
    main = text.split("Current thread")[-1]
    calls = _CALL.findall(main)[:_MOST_CALLS]
    return ", called from ".join(
        f"{name} ({Path(file).name}:{line})" for file, line, name in calls
    )


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
    pipe: Connection, address: Address, settings: ExaminationSettings, generation: int
) -> None:
    """Runs the stages that come by a pipe, until it is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # A planted nan is no alarm.
    logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
    log = ask_nccl_for_a_log(address.session, address.rank)
    with contextlib.suppress(OSError, AttributeError):
        stacks = open(_stacks_file(address, os.getpid()), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
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
                text = error_line(error)
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
    settings: ExaminationSettings,
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


STAGES = (ROLL_CALL, BARRIER, COLLECTIVES, LINKS, ARITHMETIC, STORAGE, AGREEMENT)


class Ended(BaseException):
    """The launcher ends this process."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The news that all ranks get after a stage; small, for it goes to each of them.

    Attributes:
        lost: The ranks that do not go on.
        has_group: Collectives can still be tried.
        must_restart: A process of a rank hangs: all ranks begin with new ones.
        result: The stage's result, without the data of the ranks.
        findings: Its findings.
        hosts: The names of the ranks' hosts, after the roll call.
    """

    lost: list[int]
    has_group: bool
    must_restart: bool
    result: StageResult
    findings: list[Finding]
    hosts: dict[int, str]


class Examination:
    """Runs the stages on this rank, together with the other ranks.

    Args:
        address: Where this rank and the store are.
        settings: The settings.
        stages: The stages, the roll call first.

    Attributes:
        leads: True if this rank tells the user; all do where the store is gone.
    """

    def __init__(
        self,
        address: Address,
        settings: ExaminationSettings,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        self._address = address
        self._settings = settings
        self._stages = stages
        self._patience = settings.limit + 2 * settings.grace
        self._findings: list[Finding] = []
        self._results: list[StageResult] = []
        self._doing = "roll call"
        self._hosts: dict[int, str] = {}
        self._data: dict[str, dict[int, Any]] = {}
        self._generation = 0
        self._meeting: Rendezvous | None = None
        self.leads = True

    def run(self) -> Diagnosis:
        """Examines; never raises for what it finds. Ends nothing of the user's."""
        try:
            with _ended_by_launcher():
                return self._run()
        except Ended:
            self.leads = self._meeting is None or self._meeting.leads
            self._meeting = None  # a wait at the store goes on
            where = f"The launcher ended rank {self._address.rank} in this stage."
            return self._diagnosis(where)
        except RuntimeError as error:
            self._meeting = None
            return self._diagnosis(f"Rank {self._address.rank}: {error}.")

    def _run(self) -> Diagnosis:
        self._meeting = meeting = Rendezvous(self._address)
        self._address = meeting.address
        members, waited = self._arrive(meeting)
        has_group, process = True, None
        try:
            for number, stage in enumerate(self._stages):
                self._doing = stage.name
                if stage.needs_group and not has_group:
                    self._results.append(StageResult(stage.name, "left out"))
                    continue
                if self._address.rank in members:
                    process = process or StageProcess(
                        self._address, self._settings, self._generation
                    )
                    self._run_stage(meeting, process, number, stage, members, waited)
                decision = meeting.decide(
                    f"decision{number}",
                    functools.partial(self._decide, meeting, number, stage, members),
                    2 * self._patience,
                )
                members = [rank for rank in members if rank not in set(decision.lost)]
                has_group = has_group and decision.has_group
                self._hosts = self._hosts or decision.hosts
                self._results.append(decision.result)
                self._findings += decision.findings
                if decision.must_restart:
                    self._generation += 1
                    if process is not None:
                        process.end()
                    process = None
        finally:
            if process is not None:
                process.end()
        self.leads = meeting.leads
        return self._diagnosis()

    def part(self) -> None:
        """Ends the meeting, once the rank that leads has told the user."""
        if self._meeting is not None:
            self._meeting.part(self._settings.grace)

    def _arrive(self, meeting: Rendezvous) -> tuple[list[int], float]:
        """Waits for all ranks; returns those that came, and the seconds."""
        begin, world, limit = (
            time.monotonic(),
            self._address.world,
            self._settings.limit,
        )
        meeting.post("here", None)
        members = meeting.decide(
            "members",
            lambda: sorted(meeting.gather("here", range(world), limit)),
            self._patience,
        )
        absent = [rank for rank in range(world) if rank not in set(members)]
        self._findings += missing(absent, world, limit)
        return members, time.monotonic() - begin

    def _run_stage(
        self,
        meeting: Rendezvous,
        process: StageProcess,
        number: int,
        stage: Stage,
        members: Sequence[int],
        waited: float,
    ) -> None:
        hosts = self._hosts or dict.fromkeys(members, "")
        begin = time.monotonic()
        outcome = process.run(stage, members, hosts, self._settings.limit)
        if outcome.state != "done":
            process.end()  # ranks that wait for it in a collective get an error
        outcome = dataclasses.replace(outcome, seconds=time.monotonic() - begin)
        if stage is self._stages[0] and outcome.state == "done":
            facts = dataclasses.replace(outcome.data, waited=waited)
            outcome = dataclasses.replace(outcome, data=facts)
        meeting.post(f"stage{number}", outcome)

    def _decide(
        self, meeting: Rendezvous, number: int, stage: Stage, members: list[int]
    ) -> Decision:
        """Judges a stage, on the rank that leads."""
        given = meeting.gather(f"stage{number}", members, self._patience)
        outcomes: dict[int, StageOutcome] = {
            rank: given.get(rank, StageOutcome("silent")) for rank in members
        }
        findings, lost = lost_ranks(stage.name, outcomes, self._hosts)
        data = {r: each.data for r, each in outcomes.items() if each.state == "done"}
        if data and (not lost or not stage.needs_group):
            findings += stage.judge(data, self._settings)
        self._data[stage.name] = data
        state = STATES[max((each.severity for each in findings), default=0)]
        if findings and state == STATES[0]:
            state = UNJUDGED
        seconds = max((each.seconds for each in outcomes.values()), default=0.0)
        result = StageResult(stage.name, state, seconds, len(members))
        must_restart, has_group = bool(lost), len(lost) < len(members)
        hosts = {}
        if stage is self._stages[0]:
            hosts = hosts_of(data)
        lost = lost if has_group else []
        return Decision(lost, has_group, must_restart, result, findings, hosts)

    def _diagnosis(self, unfinished: str = "") -> Diagnosis:
        findings = list(self._findings)
        if unfinished:
            findings.append(Finding(self._doing, BROKEN, (), unfinished))
        findings.sort(key=lambda each: -each.severity)
        facts = self._data.get(self._stages[0].name, {})
        links = self._data.get(LINKS.name, {})
        return Diagnosis(self._address.world, findings, self._results, facts, links)


@contextlib.contextmanager
def _ended_by_launcher() -> Iterator[None]:
    """Turns SIGTERM into `Ended`, so that what was found until then is told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
