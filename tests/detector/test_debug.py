"""What the drop-in does besides what transformers' does: arguments, removal."""

import pytest
from parity import small_model

from overflow_fast import DebugUnderflowOverflow


def test_remove_leaves_nothing_behind():
    model = small_model()
    with DebugUnderflowOverflow(model):
        assert all(m._forward_hooks for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        DebugUnderflowOverflow(3)
    with pytest.raises(TypeError, match="max_frames_to_save must be an int or None"):
        DebugUnderflowOverflow(small_model(), "21")
    with pytest.raises(ValueError, match="max_frames_to_save must not be negative"):
        DebugUnderflowOverflow(small_model(), -1)
    with pytest.raises(TypeError, match="trace_batch_nums must be a container of ints"):
        DebugUnderflowOverflow(small_model(), trace_batch_nums=3)
