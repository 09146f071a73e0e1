"""States of random number generators: the global ones, and those that objects hold."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:

    class Saved(Protocol):
        """The states of a file: see `RandomStates.as_plain()`."""

        @property
        def random(self) -> list[tuple[str, str]]: ...
        @property
        def python(self) -> tuple[int, list[int], float | None]: ...
        @property
        def numpy(self) -> dict[str, Any]: ...


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
    """

    def __init__(
        self, devices: Iterable[torch.device] = (), loads_numpys: bool = True
    ) -> None:
        self._states: dict[str, Any] = {"cpu": torch.get_rng_state()}
        for device in devices:
            module: Any = torch.get_device_module(device)
            self._states[str(device)] = module.get_rng_state(device)
        self._states["python"] = random.getstate()
        numpys: Any = sys.modules.get("numpy.random")
        if loads_numpys and "numpy" in sys.modules:  # another thread may import it
            numpys = importlib.import_module("numpy.random")
        if numpys is not None:
            self._states["numpy"] = _numpys_state(numpys)

    def restore(self) -> None:
        """Sets the generators to these states."""
        numpys: Any = sys.modules.get("numpy.random")
        for name, state in self._states.items():
            if name == "cpu":
                torch.set_rng_state(state)
            elif name == "python":
                random.setstate(state)
            elif name != "numpy":
                module: Any = torch.get_device_module(torch.device(name))
                module.set_rng_state(state, torch.device(name))
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
        now = RandomStates(map(torch.device, self._devices()))._states
        before = self._states
        return [n for n in before if n in now and not is_same_state(before[n], now[n])]

    def digests(self) -> dict[str, str]:
        """A short digest of each state, by the generator's name."""
        return {
            name: hashlib.sha256(repr(_plain(state)).encode()).hexdigest()[:16]
            for name, state in self._states.items()
        }

    def as_plain(self, put: Callable[[torch.Tensor], str]) -> dict[str, Any]:
        """The states as JSON.

        Args:
            put: Keeps a tensor, and returns its name.
        """
        torchs = {n: s for n, s in self._states.items() if isinstance(s, torch.Tensor)}
        others = {n: _plain(s) for n, s in self._states.items() if n not in torchs}
        devices = [["" if n == "cpu" else n, put(s)] for n, s in torchs.items()]
        return {"random": devices, **others}

    @classmethod
    def of_saved(
        cls, saved: Saved, tensor_of: Callable[[str], torch.Tensor]
    ) -> RandomStates:
        """Makes them of what was saved, without those of devices that are not here.

        Args:
            saved: The result of `as_plain()`, decoded.
            tensor_of: Returns the tensor that it kept by a name.

        Raises:
            ValueError: If a state is none.
            RuntimeError: Likewise, as torch says it.
        """
        states = cls.__new__(cls)
        states._states = {
            device or "cpu": tensor_of(name).to(torch.uint8)
            for device, name in saved.random
            if not device or _is_here(torch.device(device))
        }
        if "cpu" in states._states:
            torch.Generator().set_state(states._states["cpu"])  # raises if it is none
        version, numbers, gauss = saved.python
        states._states["python"] = version, tuple(numbers), gauss
        random.Random().setstate(states._states["python"])
        numpys: Any = sys.modules.get("numpy.random")
        if saved.numpy and numpys is not None:
            try:
                numpys.RandomState().set_state(saved.numpy)
            except Exception as error:
                raise ValueError(f"no state of NumPy's generator: {error}") from error
            states._states["numpy"] = saved.numpy
        return states

    def _devices(self) -> list[str]:
        return [name for name in self._states if name not in ("cpu", "python", "numpy")]


def generator_of(value: object) -> tuple[_Getter, _Setter] | None:
    """The functions that get and set a generator's state; None for no generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
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
        return bool(_plain(a) == _plain(b))
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


def _plain(state: Any) -> Any:
    """A state as JSON: NumPy's arrays and torch's tensors as lists."""
    if isinstance(state, dict):
        return {key: _plain(each) for key, each in state.items()}
    if isinstance(state, (tuple, list)):
        return [_plain(each) for each in state]
    return state.tolist() if hasattr(state, "tolist") else state


def _is_here(device: torch.device) -> bool:
    module = torch.get_device_module(device)
    return bool(module.is_available()) and (device.index or 0) < module.device_count()
