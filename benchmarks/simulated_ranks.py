"""Ranks as threads of one process: real guards over a network of Python objects.

Guard, agreement, log, flight record and replay are those of real ranks. Collectives
exchange the tensors of the threads, and fail as those of a network do: a rank that is
gone, or on the other side of a split, is an error for those that wait for it. Not
simulated: the time that a network takes. Scripted incidents of many ranks are below.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed import multi_threaded_pg

from overflow_fast import OverflowGuard
from overflow_fast.options import Log, Record

_BACKEND = "simulated"
_networks: list[Network] = []


class Network:
    """The meeting place of all collectives.

    Args:
        world: The number of ranks.

    Attributes:
        gone: The ranks that have died.
        far: The ranks on the other side of a split.
        joined: How many collectives each rank has joined.
        num_bytes: The bytes that each rank has given to them.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.gone: set[int] = set()
        self.far: set[int] = set()
        self.joined = [0] * world
        self.num_bytes = [0] * world
        self._changed = threading.Condition()
        self._given: dict[Any, dict[int, torch.Tensor]] = {}
        self._results: dict[Any, Any] = {}

    def lose(self, rank: int) -> None:
        """Lets a rank die."""
        with self._changed:
            self.gone.add(rank)
            self._changed.notify_all()

    def split(self, far: set[int]) -> None:
        """Cuts the network in two."""
        with self._changed:
            self.far = far
            self._changed.notify_all()

    def exchange(
        self,
        key: Any,
        rank: int,
        members: set[int],
        value: torch.Tensor,
        make: Callable[[dict[int, torch.Tensor]], Any],
    ) -> Any:
        """Gives a value, and returns what the last rank to come makes of all.

        Raises:
            RuntimeError: If a rank is gone or cannot be reached.
        """
        with self._changed:
            self.joined[rank] += 1
            self.num_bytes[rank] += value.nbytes
            given = self._given.setdefault(key, {})
            given[rank] = value
            if self.far:  # others may be waiting for this rank's side alone
                self._changed.notify_all()
            if len(given) == len(members):
                self._results[key] = make(given)
                self._changed.notify_all()
            while key not in self._results:
                missing = members - given.keys()
                if missing & self.gone:
                    raise RuntimeError(
                        f"Connection closed by peer {min(missing & self.gone)}"
                    )
                if missing and (rank in self.far) != (min(missing) in self.far):
                    raise RuntimeError(f"Timed out waiting for rank {min(missing)}")
                self._changed.wait()
            return self._results[key]


class _Done:
    """The handle of a collective, which is over when it is returned."""

    def wait(self, timeout: object = None) -> bool:
        return True


class SimulatedGroup(multi_threaded_pg.ProcessLocalGroup):
    """A process group over the network of the run."""

    def __init__(self, rank: int, world: int, network: Network) -> None:
        super().__init__(rank, world)
        self._network = network
        self._numbers = itertools.count()

    def _exchange(self, value: torch.Tensor, make: Callable[..., Any]) -> Any:
        ranks = set(range(self._world_size))
        key = self.pg_name, next(self._numbers)
        return self._network.exchange(key, self._rank, ranks, value, make)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Reduces by the maximum or the sum."""
        (tensor,) = tensors
        is_max = options is not None and options.reduceOp == dist.ReduceOp.MAX

        def make(given: dict[int, torch.Tensor]) -> torch.Tensor:
            stacked = torch.stack(list(given.values()))
            return stacked.amax(0) if is_max else stacked.sum(0)

        with torch.no_grad():
            tensor.copy_(self._exchange(tensor.detach().clone(), make))
        return _Done()

    def barrier(self, options: Any = None) -> Any:
        """Waits for all ranks."""
        return self.allreduce([torch.zeros(1)])

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """Gathers a tensor of each rank."""
        given = self._exchange(inputs[0].detach().clone(), dict)
        with torch.no_grad():
            for rank, output in enumerate(outputs[0]):
                output.copy_(given[rank])
        return _Done()


def _create(store: Any, rank: int, world: int, timeout: Any) -> SimulatedGroup:
    return SimulatedGroup(rank, world, _networks[-1])


def run_ranks(network: Network, function: Callable[[int], Any]) -> list[Any]:
    """Calls a function on each rank, in a thread; returns its results, or errors.

    Args:
        network: The network.
        function: What a rank does; called with its number.
    """
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, _create, devices=["cpu"])
    results: list[Any] = [None] * network.world
    store = dist.HashStore()

    def be(rank: int) -> None:
        try:
            dist.init_process_group(
                _BACKEND, rank=rank, world_size=network.world, store=store
            )
            results[rank] = function(rank)
        except Exception as error:
            results[rank] = error
        finally:
            network.lose(rank)  # nobody shall wait for it

    with _threads_have_worlds(network):
        threads = [
            threading.Thread(target=be, args=(rank,), daemon=True)
            for rank in range(network.world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


@contextlib.contextmanager
def _threads_have_worlds(network: Network) -> Iterator[None]:
    """Gives each thread process groups of its own."""
    _networks.append(network)
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        _networks.pop()


# Scripted incidents.


BAD_STEP = 1
LAST_STEP = 2


@dataclass
class Script:
    """What happens to whom, in step 1.

    Attributes:
        bad: The ranks with an inf in their batch.
        dying: The ranks that die before they agree.
        far: The ranks that a split of the network cuts off.
        behind: The rank that has not made one step of the others.
        collect: The guard's.
    """

    bad: set[int] = field(default_factory=set)
    dying: set[int] = field(default_factory=set)
    far: set[int] = field(default_factory=set)
    behind: int = -1
    collect: str = "rank0"


@dataclass
class Seen:
    """What one rank has come to.

    Attributes:
        headline: That of its last report, or "".
        cause: The cause that the replay named, or "".
        num_skipped: How many steps it skipped.
        weights: Its weights' sum in the end.
        error: The text of the error that ended it, or "".
        failures: How often the guard itself failed.
        seconds: The time of the bad step.
    """

    headline: str = ""
    cause: str = ""
    num_skipped: int = 0
    weights: float = 0.0
    error: str = ""
    failures: int = 0
    seconds: float = 0.0


class _Dead(Exception):
    """A rank that has died."""


def play(script: Script, network: Network, folder: Path) -> list[Seen | Exception]:
    """Trains three steps on all ranks, by the script; all files go to the folder."""

    def be(rank: int) -> Seen:
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        for parameter in model.parameters():  # threads share the random state
            nn.init.constant_(parameter, 0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard = OverflowGuard(
            *(model, optimizer, "skip"),
            process_group=dist.group.WORLD,
            log=Log(folder / "guard.jsonl", ranks=script.collect),
            record=Record(folder / "run.ofr", ranks=script.collect),
            evidence=folder / "evidence",
        )
        seen = Seen()
        try:
            for step in range(LAST_STEP + 1):
                begin = time.perf_counter()
                _step(script, network, rank, step, guard, model, optimizer)
                if step == BAD_STEP:
                    seen.seconds = time.perf_counter() - begin
        except RuntimeError as error:
            seen.error = str(error)
        guard.remove()
        report = guard.last_report
        if report is not None:
            seen.headline = report.headline()
            if report.explanation is not None:
                seen.cause = report.explanation.cause
        seen.num_skipped = guard.num_skipped
        seen.failures = guard.coverage().failures
        seen.weights = float(sum(p.detach().sum() for p in model.parameters()))
        return seen

    return run_ranks(network, be)


def _step(
    script: Script,
    network: Network,
    rank: int,
    step: int,
    guard: OverflowGuard,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    batch = torch.ones(2, 4)
    if step == BAD_STEP:
        if rank in script.dying:
            network.lose(rank)
            raise _Dead
        if script.far:
            network.split(script.far)
        if rank in script.bad:
            batch[0, 0] = torch.inf
        if rank == script.behind:
            guard.step = step - 1
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """The number and bytes of files: logs, records, evidence."""
    found = {"log": (0, 0), "record": (0, 0), "evidence": (0, 0)}
    for path in folder.rglob("*"):
        if path.is_file():
            kind = {".jsonl": "log", ".ofr": "record"}.get(path.suffix, "evidence")
            count, size = found[kind]
            found[kind] = count + 1, size + path.stat().st_size
    return found


def bytes_of_lines(folder: Path) -> dict[str, float]:
    """The mean length of a log's lines: of clean steps, and of bad ones."""
    lengths: dict[str, list[int]] = {"clean": [], "bad": []}
    for path in folder.glob("guard*.jsonl"):
        for text in path.read_text().splitlines():
            line: dict[str, Any] = json.loads(text)
            if line["kind"] == "step":
                lengths["clean" if line["is_clean"] else "bad"].append(len(text) + 1)
    return {kind: sum(each) / max(1, len(each)) for kind, each in lengths.items()}


Scenario = Callable[[int], Script]
SCENARIOS: dict[str, Scenario] = {
    "quiet": lambda world: Script(),
    "one bad rank": lambda world: Script(bad={world // 2}),
    "most ranks bad": lambda world: Script(bad=set(range(world - world // 5, 0, -1))),
    "ranks die": lambda world: Script(bad={0}, dying={world // 2, world - 1}),
    "network split": lambda world: Script(bad={0}, far=set(range(world // 2))),
    "one step behind": lambda world: Script(behind=world - 1),
}
