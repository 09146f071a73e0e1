"""States of random number generators: the global ones, and those that objects hold."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

# torch reads a generator's state under a lock of its own, in which it makes an object
# of Python's. If the collector runs then, it may let a thread go on that waits for that
# lock and has Python's: neither ever goes on. So one thread at a time reads and sets.
_one_thread = threading.RLock()
_MT19937_BYTES = 625 * 4  # its numbers, and its place among them
_Getter = Callable[[], Any]
_Setter = Callable[[Any], object]


class RandomStates:
    """The states of the global generators: torch's on each device, Python's, NumPy's.

    As a context manager it restores them on exit.

    Does not incur a CPU-GPU sync.

    Args:
        devices: The devices besides the CPU whose generators are meant.
        loads_numpys: Import `numpy.random` if NumPy is there, which does not do so
            itself: else a generator whose first draw is still to come is not taken.

    Attributes:
        states: The states, by the names of devices, "python" and "numpy".
    """

    def __init__(
        self, devices: Iterable[torch.device] = (), loads_numpys: bool = True
    ) -> None:
        self.states: dict[str, Any] = {}
        with _one_thread:
            self.states["cpu"] = torch.get_rng_state()
            for device in devices:
                module: Any = torch.get_device_module(device)
                self.states[str(device)] = module.get_rng_state(device)
        self.states["python"] = random.getstate()
        numpys: Any = sys.modules.get("numpy.random")
        if loads_numpys and "numpy" in sys.modules:  # another thread may import it
            numpys = importlib.import_module("numpy.random")
        if numpys is not None:
            self.states["numpy"] = _numpys_state(numpys)

    @classmethod
    def of(cls, states: dict[str, Any]) -> RandomStates:
        """Makes them of states that are known, by the same names."""
        made = cls.__new__(cls)
        made.states = states
        return made

    def restore(self) -> None:
        """Sets the generators to these states."""
        numpys: Any = sys.modules.get("numpy.random")
        for name, state in self.states.items():
            if name == "python":
                random.setstate(state)
            elif name != "numpy":
                with _one_thread:
                    _set_torchs(name, state)
            elif numpys is not None:  # a saved state may be of a program that had it
                numpys.set_state(state)

    def __enter__(self) -> RandomStates:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()

    def drawn(self) -> list[str]:
        """The names of the generators that were used since.

        Of one that was not there, as before the import of NumPy, nothing is known.
        """
        return self.others_in(self.of_now())

    def others_in(self, later: RandomStates) -> list[str]:
        """The names of the generators that have another state in later ones."""
        now, before = later.states, self.states
        return [n for n in before if n in now and not is_same_state(before[n], now[n])]

    def of_now(self) -> RandomStates:
        """The states of the same generators at this moment."""
        names = [n for n in self.states if n not in ("cpu", "python", "numpy")]
        return RandomStates(map(torch.device, names))

    def digests(self) -> dict[str, str]:
        """A short digest of each state, by the generator's name."""
        return {
            name: hashlib.sha256(repr(plain_state(state)).encode()).hexdigest()[:16]
            for name, state in self.states.items()
        }


def _set_torchs(device: str, state: torch.Tensor) -> None:
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        module: Any = torch.get_device_module(torch.device(device))
        module.set_rng_state(state, torch.device(device))


def _in_one_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with _one_thread:
            return function(*given)

    return call


def kinds_of_generators() -> tuple[type, ...]:
    """The types of objects whose states `generator_of` knows."""
    numpys: Any = sys.modules.get("numpy.random")
    if numpys is None:
        return torch.Generator, random.Random
    own = numpys.RandomState, numpys.Generator, numpys.BitGenerator
    return torch.Generator, random.Random, *own


def generator_of(value: object) -> tuple[_Getter, _Setter] | None:
    """The functions that get and set a generator's state; None for no generator."""
    if isinstance(value, torch.Generator):  # it may be the global one
        return _in_one_thread(value.get_state), _in_one_thread(value.set_state)
    if isinstance(value, random.Random):
        is_stateless = isinstance(value, random.SystemRandom)
        return None if is_stateless else (value.getstate, value.setstate)
    numpys: Any = sys.modules.get("numpy.random")
    if numpys is None:
        return None
    if isinstance(value, numpys.RandomState):
        old: Any = value
        return lambda: old.get_state(legacy=False), old.set_state
    if isinstance(value, numpys.Generator):
        value = value.bit_generator
    if isinstance(value, numpys.BitGenerator):
        bits: Any = value

        def put_back(state: Any) -> None:
            bits.state = state

        return lambda: bits.state, put_back
    return None


def is_same_state(a: Any, b: Any) -> bool:
    """True if two states of a generator are equal."""
    if isinstance(a, dict) and isinstance(b, dict):
        return all(k in b and is_same_state(each, b[k]) for k, each in a.items())
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if hasattr(a, "tolist") or hasattr(b, "tolist"):
        return bool(plain_state(a) == plain_state(b))
    return bool(a == b)


_known: dict[str, tuple[bytes, Any, Any]] = {}  # NumPy's last state


def _numpys_state(numpys: Any) -> Any:
    """The state of NumPy's global generator, read again if it was used since.

    Reading takes 35 us, as long as the memory of 2500 bytes differs from the last time.
    A kept second normal number shows nowhere in that memory: such a state is read anew.
    """
    bits = numpys.get_bit_generator()
    if type(bits) is not numpys.MT19937:
        return numpys.get_state(legacy=False)
    memory = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)
    known = _known.get("numpy")
    if known is not None and known[0] == memory and known[1] is bits:
        return known[2]
    state = numpys.get_state(legacy=False)
    if state["has_gauss"]:
        _known.clear()
    else:
        _known["numpy"] = memory, bits, state
    return state


def plain_state(state: Any) -> Any:
    """A state as JSON: NumPy's arrays and torch's tensors as lists."""
    if isinstance(state, dict):
        return {key: plain_state(each) for key, each in state.items()}
    if isinstance(state, (tuple, list)):
        return [plain_state(each) for each in state]
    return state.tolist() if hasattr(state, "tolist") else state
