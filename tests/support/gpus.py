"""A GPU, or the emulated one, for tests whose body runs on both."""

import contextlib

import pytest
import torch

GPUS = ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)]


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
