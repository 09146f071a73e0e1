"""The process at hand: pauses of its garbage collector end as it was before."""

import gc

import pytest

from overflow_fast.guard.process import without_collection


@pytest.fixture(autouse=True)
def collector():
    """Leaves the collector on, whatever a test does."""
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_a_pause_leaves_the_collector_as_it_was(is_on):
    (gc.enable if is_on else gc.disable)()
    with without_collection():
        assert not gc.isenabled()
        with without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == is_on


def test_an_error_ends_a_pause():
    with pytest.raises(KeyError), without_collection():
        raise KeyError
    assert gc.isenabled()
