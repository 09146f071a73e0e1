"""The same text and the same error as transformers' detector, on small modules."""

import collections
import copy
import math
import pickle

import pytest
import torch
from parity import check_parity, small_model, spoil
from torch import nn
from torch.utils.checkpoint import checkpoint

DETECTED = "inf/nan detected"
Pair = collections.namedtuple("Pair", ["first", "second"])


def batches(count, shape=(2, 4)):
    def drive(model, detector):
        for _ in range(count):
            model(torch.randn(shape))

    return drive


def batches_then_inf(model, detector):
    batches(3)(model, detector)
    spoil(model[2])
    batches(1)(model, detector)


@pytest.mark.parametrize("limit", [0, 1, 3, 21, 1000, None])
def test_frame_limits(limit):
    _, error = check_parity(small_model, batches_then_inf, max_frames_to_save=limit)
    assert DETECTED in error


@pytest.mark.parametrize(
    "arguments",
    [
        {"trace_batch_nums": [1]},
        {"trace_batch_nums": {0, 2}, "abort_after_batch_num": 1},
        {"abort_after_batch_num": 0},
        {"abort_after_batch_num": False},
        {"trace_batch_nums": range(9), "abort_after_batch_num": 2},
    ],
    ids=str,
)
def test_tracing_and_abort(arguments):
    check_parity(small_model, batches_then_inf, **arguments)


class Returns(nn.Module):
    """Calls a child and returns what it is told to make of the result."""

    def __init__(self, make):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.make = make

    def forward(self, *inputs):
        return self.make(self.child(inputs[0]), *inputs[1:])


OUTPUTS = {
    "tuple": lambda x: (x, x * 2),
    "nested": lambda x: (x, (x * 2, None, x + 1), None, 5),
    "none": lambda x: None,
    "number": lambda x: 3,
    "string": lambda x: "done",
    "namedtuple": lambda x: Pair(x, None),
    "size": lambda x: x.shape,
    "empty tuple": lambda x: (),
    "list of numbers": lambda x: [1, 2],
    "tuple with a list": lambda x: (x, [1, 2], ((1, 2), 3)),
    "integers": lambda x: torch.arange(-3, 5).reshape(2, 4),
    "complex": lambda x: torch.complex(x, x * 2),
    "scalar": lambda x: x.sum(),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs(name):
    def make():
        return nn.Sequential(Returns(OUTPUTS[name]))

    check_parity(make, batches(2), trace_batch_nums=[0, 1])


@pytest.mark.parametrize(
    "inputs",
    [(None, 5, "text"), ((torch.ones(2), None),), (torch.arange(3),), ([1], {"a": 1})],
    ids=str,
)
def test_inputs(inputs):
    def drive(model, detector):
        model(torch.randn(2, 4), *inputs)

    check_parity(lambda: Returns(lambda x, *rest: x), drive, trace_batch_nums=[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "max", "subnormal", "-0.0"])
def test_values(dtype, value):
    info = torch.finfo(dtype)
    known = {"max": info.max, "subnormal": info.smallest_normal / 2}
    planted = known.get(value)
    planted = float(value) if planted is None else planted

    def drive(model, detector):
        x = torch.ones(2, 4, dtype=dtype)
        model(x)
        x[1, 3] = planted
        model(x)
        x[0, 0] = math.nan
        model(x)

    check_parity(lambda: nn.Sequential(nn.Identity()), drive)


def test_a_frame_with_infs_and_nans(as_kept):
    def drive(model, detector):
        model(torch.tensor([1.0, math.nan, math.inf]))

    out, _ = check_parity(lambda: nn.Sequential(nn.Identity()), drive)
    as_kept(out)


class TwoUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.again = self.a

    def forward(self, x):
        return self.b(self.again(self.a(x)))


def test_shared_weights_and_modules():
    check_parity(TwoUses, batches(3), trace_batch_nums=[0, 2])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.left, self.right = nn.Sequential(self.shared), nn.Sequential(self.shared)

    def forward(self, x):
        return self.right(self.left(x))


def test_a_module_under_two_parents_is_reported_twice_when_strict():
    check_parity(Tied, batches(2), trace_batch_nums=[0], only_strict=True)


def test_modules_that_work_in_place():
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.5))

    check_parity(make, batches(2), trace_batch_nums=[0, 1])


class OneWeight(nn.Module):
    """A parameter under two names, and a None."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(4))
        self.second = self.first
        self.register_parameter("nothing", None)

    def forward(self, x):
        return x * self.first


def test_parameters_with_two_names_or_none():
    check_parity(OneWeight, batches(1), trace_batch_nums=[0])


def test_no_grad_and_inference_mode():
    def drive(model, detector):
        with torch.no_grad():
            batches(1)(model, detector)
        with torch.inference_mode():
            batches(2)(model, detector)
        spoil(model)
        with torch.inference_mode():
            batches(1)(model, detector)

    assert DETECTED in check_parity(small_model, drive)[1]


def test_autocast():
    def drive(model, detector):
        with torch.autocast("cpu", torch.bfloat16):
            batches(2)(model, detector)
            spoil(model)
            batches(1)(model, detector)

    check_parity(small_model, drive, trace_batch_nums=[0])


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.second, x, use_reentrant=self.use_reentrant).sum()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_forward_with_activation_checkpointing(use_reentrant):
    def drive(model, detector):
        batches(2)(model, detector)
        spoil(model.second)
        batches(1)(model, detector)

    check_parity(lambda: Checkpointed(use_reentrant), drive)


def test_backward_with_reentrant_checkpointing_when_strict():
    def drive(model, detector):
        for _ in range(2):
            model(torch.randn(2, 4, requires_grad=True)).backward()
        spoil(model.second)
        model(torch.randn(2, 4))

    check_parity(lambda: Checkpointed(True), drive, only_strict=True)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        if x.shape[0] == 3:
            raise RuntimeError("three rows")
        return self.second(x)


def test_exceptions_in_forward_when_strict():
    def drive(model, detector):
        batches(1)(model, detector)
        with pytest.raises(RuntimeError, match="three rows"):
            model(torch.randn(3, 4))
        batches(2)(model, detector)
        spoil(model)
        batches(1)(model, detector)

    check_parity(Raises, drive, only_strict=True)


def test_submodules_called_alone():
    def drive(model, detector):
        model[0](torch.randn(2, 4))
        model(torch.randn(2, 4))
        model[2](torch.randn(2, 8))
        batches(2)(model, detector)
        spoil(model)
        batches(1)(model, detector)

    check_parity(small_model, drive)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        x = self.child(x)
        return self(x, depth - 1) if depth else x


@pytest.mark.parametrize("traced", [(), (0, 3, 4)])
def test_reentrant_calls(traced):
    def drive(model, detector):
        batches(2)(model, detector)
        spoil(model)
        batches(1)(model, detector)

    check_parity(Recursive, drive, trace_batch_nums=traced)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "pickle"],
)
def test_copies_of_a_watched_model(copied):
    def drive(model, detector):
        batches(1)(model, detector)
        twin = copied(model)
        batches(1)(twin, detector)
        batches(1)(model, detector)
        spoil(twin)
        batches(1)(twin, detector)

    check_parity(small_model, drive, max_frames_to_save=7)


def test_two_detectors_on_one_model():
    def drive(model, detector):
        second = type(detector)(model)
        batches(1)(model, detector)
        assert second.batch_number == detector.batch_number == 1
        spoil(model)
        batches(1)(model, detector)

    # Deferred verdicts come from both detectors, each at the end of its step.
    check_parity(small_model, drive, only_at_once=True)


@pytest.mark.parametrize("write", ["data", "numpy"])
def test_a_weight_written_behind_autograds_back(write):
    def drive(model, detector):
        batches(2)(model, detector)
        if write == "data":
            model[0].weight.data[0, 0] = math.inf
        else:
            model[0].weight.detach().numpy()[0, 0] = math.inf
        batches(1)(model, detector)

    assert DETECTED in check_parity(small_model, drive)[1]


def test_public_attributes_between_batches():
    def drive(model, detector):
        for _ in range(3):
            batches(1)(model, detector)
            print(
                list(detector.frames),
                detector.frame,
                detector.batch_number,
                detector.total_calls,
                detector.detected_overflow,
                repr(detector.prefix),
                detector.trace_batch_nums,
                detector.abort_after_batch_num,
                detector.model is model,
            )

    check_parity(small_model, drive, max_frames_to_save=8, abort_after_batch_num=7)


@pytest.mark.parametrize("strict", [True, False])
def test_a_root_that_is_bad_from_its_second_batch_on(strict):
    """In batch 0 the two differ, which has a test of its own."""

    def drive(model, detector):
        batches(1)(model, detector)
        model.make = lambda x: x / 0
        batches(1)(model, detector)

    def make():
        return Returns(lambda x: x)

    out, _ = check_parity(make, drive, only_strict=True)
    assert "batch_number=2" in out
