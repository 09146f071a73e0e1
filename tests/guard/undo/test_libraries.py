"""Objects of libraries that train hold no state of a model: no replay keeps them."""

import pytest

from overflow_fast.guard.libraries import LIBRARIES
from overflow_fast.guard.undo.kept_objects import KeptObjects


class Loop:
    def __init__(self):
        self.calls = []


@pytest.mark.parametrize(
    "package, is_kept",
    [
        *((name, False) for each in LIBRARIES.values() for name in each.packages),
        *((name, False) for name in ("lightning", "pytorch_lightning", "accelerate")),
        *((name, False) for name in ("deepspeed", "torch")),
        ("program", True),
    ],
)
def test_an_object_of_a_library_that_trains_is_left_as_it_is(
    package, is_kept, monkeypatch
):
    monkeypatch.setattr(Loop, "__module__", f"{package}.loops")
    loop = Loop()
    kept = KeptObjects()
    kept.add([("loop", loop)])
    loop.calls.append(1)
    kept.restore()
    assert (loop.calls == []) is is_kept
