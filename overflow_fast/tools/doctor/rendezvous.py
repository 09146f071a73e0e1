"""The store at which the ranks meet: answers with a limit, and one rank that decides.

It is a store and not a process group: a rank that hangs in a collective cannot say so
by another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from .roll_call import number_of

_T = TypeVar("_T")
_CONNECTION_SECONDS = 60  # for the store to answer; chosen
_WAIT_SECONDS = 1.0  # until Ctrl-C is heard; chosen


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
        deadline = time.monotonic() + seconds
        while True:
            # In short waits, since one lets no Ctrl-C through.
            left = min(_WAIT_SECONDS, max(0.01, deadline - time.monotonic()))
            try:
                self._store.wait(keys, datetime.timedelta(seconds=left))
                return True
            except dist.DistNetworkError as error:
                place = f"{self.address.host}:{self.address.port}"
                raise RuntimeError(f"the store at {place} is gone: {error}") from error
            except dist.DistStoreError:
                if time.monotonic() >= deadline:
                    return False


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
