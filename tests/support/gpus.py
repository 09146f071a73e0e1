"""A GPU, or the emulated one, for tests whose body runs on both."""

import contextlib

import pytest
import torch
from sealed import sealed_device

GPUS = [
    "emulated",
    pytest.param("sealed", marks=pytest.mark.sealed),
    pytest.param("cuda", marks=pytest.mark.cuda),
]


class Emulated:
    """The CPU, whose stats are treated as if they were on a device."""

    device = torch.device("cpu")
    options = {"_defer": True}  # noqa: RUF012

    def __init__(self, emulated):
        self.emulated = emulated

    @contextlib.contextmanager
    def side_stream(self):
        self.emulated.state.stream = 7
        yield
        self.emulated.state.stream = 0

    def spend_time(self):
        pass


class Sealed:
    """A simulated device without kernels of its own, whose side streams run late."""

    options: dict = {}  # noqa: RUF012

    def __init__(self):
        self.module = sealed_device()
        self.device = torch.device("sealed", 0)
        self.side = torch.Stream(device=self.device)

    @contextlib.contextmanager
    def side_stream(self):
        """As that of a GPU."""
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.module.late():
            with self.side:
                yield
            torch.accelerator.current_stream().wait_stream(self.side)

    def spend_time(self):
        pass


class Cuda:
    """The current GPU."""

    device = torch.device("cuda")
    options: dict = {}  # noqa: RUF012

    def __init__(self):
        self.side = torch.cuda.Stream()

    @contextlib.contextmanager
    def side_stream(self):
        """A second stream, which waits for the first; the first then waits for it."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield
        torch.cuda.current_stream().wait_stream(self.side)

    def spend_time(self):
        torch.cuda._sleep(10_000_000)  # some milliseconds
