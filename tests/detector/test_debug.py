"""What the drop-in does besides what transformers' does: arguments, removal."""

from parity import small_model

from overflow_fast import DebugUnderflowOverflow


def test_remove_leaves_nothing_behind():
    model = small_model()
    with DebugUnderflowOverflow(model):
        assert all(m._forward_hooks for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_wrong_arguments(as_kept):
    as_kept.error(TypeError, DebugUnderflowOverflow, 3)
    as_kept.error(TypeError, DebugUnderflowOverflow, small_model(), "21")
    as_kept.error(ValueError, DebugUnderflowOverflow, small_model(), -1)
    as_kept.error(TypeError, DebugUnderflowOverflow, small_model(), trace_batch_nums=3)
