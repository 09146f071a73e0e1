"""Examines the ranks stage by stage, each in a process that is left where it hangs.

The ranks meet at a store and not in a process group: a rank that hangs in a collective
cannot say so by another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...base.text import capitalized, error_line
from .checks import AGREEMENT, ARITHMETIC, BARRIER, COLLECTIVES
from .diagnosis import Diagnosis
from .roll_call import (
    ROLL_CALL,
    ask_nccl_for_a_log,
    backend_of,
    device_of_rank,
    missing,
    network_in,
    number_of,
    warnings_in,
)
from .stage import (
    BROKEN,
    STATES,
    UNJUDGED,
    ExaminationSettings,
    Finding,
    Stage,
    StageOutcome,
    StageResult,
    StageSite,
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
    return Finding(stage, BROKEN, (rank,), capitalized(text))


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
        return Finding(stage, BROKEN, (), capitalized(text))
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
    return Finding(stage, BROKEN, tuple(behind), capitalized(text))


_MOST_STACKS = 2  # of ranks that are behind, in a terminal; chosen


# The store at which the ranks meet: answers with a limit, and one rank that decides.


_T = TypeVar("_T")
_CONNECTION_SECONDS = 60  # for the store to answer; chosen


@dataclass(frozen=True)
class Address:
    """The place of a rank among the others, and of their store.

    Attributes:
        rank: The rank.
        world: How many ranks there are.
        host: The store's host.
        port: Its port; 0 for any.
        is_host: This rank holds the store.
        session: A name that no other examination at this store has.
    """

    rank: int
    world: int
    host: str
    port: int
    is_host: bool
    session: str

    @classmethod
    def from_environment(cls) -> Address:
        """Reads what torchrun, SLURM or Kubernetes have set; one rank without them.

        Raises:
            ValueError: If there are several ranks, and no MASTER_ADDR or MASTER_PORT.
        """
        rank = number_of("RANK", "SLURM_PROCID")
        world = number_of("WORLD_SIZE", "SLURM_NTASKS")
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if rank is None or world is None or world == 1:
            return cls(0, 1, "localhost", 0, True, f"doctor{os.getpid()}")
        host, port = os.environ.get("MASTER_ADDR", ""), number_of("MASTER_PORT")
        if not host or port is None:
            raise ValueError(
                f"there are {world} ranks: set MASTER_ADDR to the host of rank 0 and "
                "MASTER_PORT to a free port there, or start them by torchrun"
            )
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_host = rank == 0 and not has_agent
        run = os.environ.get("TORCHELASTIC_RUN_ID", os.environ.get("SLURM_STEP_ID", ""))
        return cls(rank, world, host, port, is_host, f"doctor{run}.{attempt}")


class Rendezvous:
    """Exchanges values of the ranks by way of the store.

    Args:
        address: Where this rank and the store are.

    Attributes:
        address: The same, with the port.
        leader: The rank that decides.

    Raises:
        RuntimeError: If the store does not answer.
    """

    def __init__(self, address: Address) -> None:
        self._tcp = connect(address.host, address.port, address.is_host)
        self._store = prefixed(address.session, self._tcp)
        self.address = dataclasses.replace(address, port=self._tcp.port)
        self.leader = 0

    @property
    def is_leader(self) -> bool:
        """True if this rank decides."""
        return self.leader == self.address.rank

    def post(self, key: str, value: Any) -> None:
        """Leaves a value for the one that decides."""
        self._store.set(f"{key}/{self.address.rank}", pickle.dumps(value))

    def gather(self, key: str, ranks: Sequence[int], seconds: float) -> dict[int, Any]:
        """Returns the values that ranks have left within a time, by rank."""
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        self._wait(list(keys.values()), seconds)
        there = [rank for rank in ranks if self._store.check([keys[rank]])]
        return {rank: pickle.loads(self._store.get(keys[rank])) for rank in there}

    def decide(self, key: str, make: Callable[[], _T], patience: float) -> _T:
        """Returns what the leading rank decides; another one leads where it is gone.

        Args:
            key: The decision's name.
            make: Decides; called on the rank that leads.
            patience: The seconds to wait for it.

        Raises:
            RuntimeError: If no rank decides.
        """
        for _ in range(2):
            if self.is_leader:
                value = make()
                self._store.set(key, pickle.dumps(value))
                return value
            if self._wait([key], patience):
                heard: _T = pickle.loads(self._store.get(key))
                return heard
            own = str(self.address.rank)
            self.leader = int(self._store.compare_set(f"{key}/leader", "", own))
        if self.is_leader:
            return make()
        raise RuntimeError(f"no rank has decided on {key}")

    def part(self, seconds: float) -> None:
        """Waits until the leader has told the user, and the others need no store.

        A launcher ends all ranks when the first of them ends with a status.
        """
        with contextlib.suppress(RuntimeError):
            if self.is_leader:
                self._store.set("told", "")
            else:
                self._wait(["told"], seconds)
            self.post("bye", None)
            if self.address.is_host:
                self._wait([f"bye/{r}" for r in range(self.address.world)], seconds)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        """Waits for keys; returns False if they are not all there in time.

        Raises:
            RuntimeError: If the store is gone.
        """
        found: list[Exception | None] = []

        def wait() -> None:
            try:
                self._store.wait(keys, datetime.timedelta(seconds=max(0.01, seconds)))
                found.append(None)
            except Exception as error:
                found.append(error)

        # A wait in C++ lets no signal through, such as a launcher's SIGTERM.
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join()
        error = found[0]
        if isinstance(error, dist.DistNetworkError):
            place = f"{self.address.host}:{self.address.port}"
            raise RuntimeError(f"the store at {place} is gone: {error}") from error
        return error is None


def prefixed(prefix: str, store: Any) -> Any:
    """Returns a store whose keys begin with a prefix."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def connect(host: str, port: int, is_host: bool) -> Any:
    """Connects with the store, or makes it.

    Raises:
        RuntimeError: If it does not answer.
    """
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        None,
        is_host,
        datetime.timedelta(seconds=_CONNECTION_SECONDS),
        wait_for_workers=False,
        multi_tenant=is_host and port != 0,
    )


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


_STACK_SECONDS = 2.0  # for `faulthandler` to write; chosen
_MOST_CALLS = 3  # of a stack, the innermost; chosen
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
) -> StageSite:
    device = device_of_rank()
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def note(text: str) -> None:
        pipe.send(("note", text))

    return StageSite(
        *(address.rank, members, hosts, device, settings, note, address.session),
        lambda: network_in(_text_of(log)),
    )


def _make_group(site: StageSite, address: Address, generation: int) -> None:
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


STAGES = (ROLL_CALL, BARRIER, COLLECTIVES, ARITHMETIC, AGREEMENT)


class Ended(BaseException):
    """The launcher ends this process."""


@dataclass(frozen=True)
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
        is_leader: True if this rank tells the user; all do where the store is gone.
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
        self._rendezvous: Rendezvous | None = None
        self.is_leader = True

    def run(self) -> Diagnosis:
        """Examines; never raises for what it finds. Ends nothing of the user's."""
        try:
            with _ended_by_launcher():
                return self._run()
        except Ended:
            self.is_leader = self._rendezvous is None or self._rendezvous.is_leader
            self._rendezvous = None  # a wait at the store goes on
            where = f"The launcher ended rank {self._address.rank} in this stage."
            return self._diagnosis(where)
        except RuntimeError as error:
            self._rendezvous = None
            return self._diagnosis(f"Rank {self._address.rank}: {error}.")

    def _run(self) -> Diagnosis:
        self._rendezvous = rendezvous = Rendezvous(self._address)
        self._address = rendezvous.address
        members, waited = self._arrive(rendezvous)
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
                    self._run_stage(rendezvous, process, number, stage, members, waited)
                decision = rendezvous.decide(
                    f"decision{number}",
                    functools.partial(self._decide, rendezvous, number, stage, members),
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
        self.is_leader = rendezvous.is_leader
        return self._diagnosis()

    def part(self) -> None:
        """Ends the rendezvous, once the rank that leads has told the user."""
        if self._rendezvous is not None:
            self._rendezvous.part(self._settings.grace)

    def _arrive(self, rendezvous: Rendezvous) -> tuple[list[int], float]:
        """Waits for all ranks; returns those that came, and the seconds."""
        begin, world, limit = (
            time.monotonic(),
            self._address.world,
            self._settings.limit,
        )
        rendezvous.post("here", None)
        members = rendezvous.decide(
            "members",
            lambda: sorted(rendezvous.gather("here", range(world), limit)),
            self._patience,
        )
        absent = [rank for rank in range(world) if rank not in set(members)]
        self._findings += missing(absent, world, limit)
        return members, time.monotonic() - begin

    def _run_stage(
        self,
        rendezvous: Rendezvous,
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
        rendezvous.post(f"stage{number}", outcome)

    def _decide(
        self, rendezvous: Rendezvous, number: int, stage: Stage, members: list[int]
    ) -> Decision:
        """Judges a stage, on the rank that leads."""
        given = rendezvous.gather(f"stage{number}", members, self._patience)
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
        return Diagnosis(self._address.world, findings, self._results, facts)


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
