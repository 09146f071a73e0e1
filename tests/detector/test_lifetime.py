"""Nothing is kept alive that the program has let go, and no hook is left behind."""

import gc
import weakref

import pytest
import torch
from assembled import Assembled
from parity import small_model, spoil
from torch import nn

from overflow_fast import DebugUnderflowOverflow


def hooks_of(model):
    """Every hook that is registered anywhere in a model."""
    found = []
    for module in model.modules():
        for name, value in vars(module).items():
            if "hook" in name and hasattr(value, "__len__"):
                found += value
    return found


@pytest.mark.parametrize("strict", [False, True])
def test_remove_leaves_no_hook(strict):
    model = small_model()
    detector = DebugUnderflowOverflow(model, strict_compat=strict)
    assert hooks_of(model)
    detector.remove()
    detector.remove()
    assert hooks_of(model) == []


def test_the_context_manager_removes_also_on_an_error():
    model = small_model()
    with pytest.raises(ValueError, match="inf/nan"), DebugUnderflowOverflow(model):
        spoil(model)
        model(torch.ones(1, 4))
    assert hooks_of(model) == []


def test_a_failing_constructor_leaves_no_hook():
    model = small_model()
    with pytest.raises(TypeError):
        DebugUnderflowOverflow(model, trace_batch_nums=3)
    assert hooks_of(model) == []


def test_removed_while_a_forward_runs():
    class Removes(nn.Module):
        def forward(self, x):
            detector.remove()
            return x

    model = nn.Sequential(nn.Identity(), Removes(), nn.Identity())
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(1))
    model(torch.ones(1))
    assert hooks_of(model) == []


def test_hooks_of_others_stay():
    model = small_model()
    seen = []
    model[0].register_forward_hook(lambda *call: seen.append(1))
    DebugUnderflowOverflow(model).remove()
    model(torch.ones(1, 4))
    assert seen == [1]


def test_a_detector_does_not_keep_its_model():
    model = small_model()
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(1, 4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert detector.model is None
    detector.remove()


def test_model_and_detector_go_together():
    model = small_model()
    gone = weakref.ref(model), weakref.ref(DebugUnderflowOverflow(model))
    model(torch.ones(1, 4))
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


class Looks(Assembled):
    """Notes which activations of an earlier child are still alive."""

    def forward(self, x):
        hidden = self.first(x)
        self.reference = weakref.ref(hidden)
        out = self.second(hidden)
        del hidden
        self.alive = self.reference() is not None
        return out


@pytest.mark.parametrize("defer", [False, True])
def test_activations_are_not_kept(defer):
    model = Looks(first=nn.Linear(4, 4096), second=nn.Linear(4096, 4), alive=None)
    DebugUnderflowOverflow(model, _defer=defer)
    with torch.no_grad():
        model(torch.ones(1, 4))
    assert model.alive is False


def test_the_memory_of_an_activation_is_given_back_within_the_step():
    class Frees(Assembled):
        def forward(self, x):
            big = torch.ones(1 << 20)
            self.child(big)
            storage = big.untyped_storage()
            self.reference = weakref.ref(storage)
            del big, storage
            self.alive = self.reference() is not None
            return x

    model = Frees(child=nn.Identity())
    DebugUnderflowOverflow(model)
    model(torch.ones(1))
    assert model.alive is False


def test_a_new_tensor_at_an_old_address_is_scanned():
    class Reuses(Assembled):
        def forward(self, x):
            for value in (*range(50), torch.inf):
                self.child(torch.full((4096,), float(value)))
            return x

    model = Reuses(child=nn.Identity())
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="inf/nan"):
        model(torch.ones(1))


def test_memory_does_not_grow_with_the_number_of_steps():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    detector = DebugUnderflowOverflow(model)
    model(torch.ones(1, 4))
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(50):
        model(torch.ones(1, 4))
    gc.collect()
    assert len(gc.get_objects()) - before < 10
    assert len(detector.frames) == 21
