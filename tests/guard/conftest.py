"""Guards of these tests explain nothing, unless they are told to or a mark asks for it.

An explanation takes 0.1 s, fifteen times what the rest of an alarm does. The processes
that tests start have the package's default.
"""

import inspect
import sys

import pytest

from overflow_fast import OverflowGuard


@pytest.fixture(autouse=True)
def unexplained(request, monkeypatch):
    """`explain=False` is the default, also of guards that helpers make.

    For tests and modules without the mark `explains`.
    """
    if request.node.get_closest_marker("explains") is None:
        init = inspect.unwrap(OverflowGuard.__init__)
        monkeypatch.setitem(init.__kwdefaults__, "explain", False)


@pytest.fixture
def hurry():
    """Threads take turns every 10 microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)
