"""Devices' own overflow flags: they are asked once a step, and act like a bad value."""

import pytest
import torch
from guarding import batches, make, train_step

import overflow_fast
from overflow_fast import NonFiniteError, OverflowGuard, flags
from overflow_fast.guard.verdict.verdict import is_of_flag

SENTENCE = (
    "the device's overflow flag was set, and no tensor that was seen is bad: an "
    "operation overflowed inside"
)


class Device:
    """A device that saturates: what is beyond its limit is cut off, and sets a flag."""

    def __init__(self, is_tensor=False):
        self.is_set, self.is_tensor = False, is_tensor
        self.num_read = self.num_cleared = 0

    def clear(self):
        self.num_cleared += 1
        self.is_set = False

    def read(self):
        self.num_read += 1
        value = self.is_set
        return torch.tensor([float(value)] * 8) if self.is_tensor else value


@pytest.fixture
def device(request):
    found = Device(getattr(request, "param", False))
    flags.register("cpu", clear=found.clear, read=found.read)
    _devices.append(found)
    yield found
    _devices.clear()
    flags.unregister("cpu")


_devices = []


@torch.library.custom_op("overflow_fast_tests::saturate", mutates_args=())
def saturate(x: torch.Tensor) -> torch.Tensor:
    """A kernel that cuts off what is too large, and sets the flag."""
    for device in _devices:
        device.is_set |= bool((x.abs() > 100).any())
    return x.clamp(-100, 100)


saturate.register_autograd(lambda ctx, gradient: gradient)


class Kernel(torch.nn.Module):
    def forward(self, x):
        return saturate(x)


def saturating():
    """A model on a device whose second activation saturates."""
    model, optimizer = make()
    model.blocks[1].act = Kernel()
    return model, optimizer


def large(batch):
    return batch[0] * 1e6, batch[1]


@pytest.mark.parametrize("device", [False, True], indirect=True)
def test_a_flag_that_is_set_skips_the_step(device, as_kept):
    model, optimizer = saturating()
    guard = OverflowGuard(model, optimizer, on_overflow="skip", explain=False)
    first, second, third = batches(3)
    train_step(model, optimizer, first)
    before = model.head.weight.clone()
    train_step(model, optimizer, large(second))
    assert guard.last_step_skipped and torch.equal(model.head.weight, before)
    report = guard.last_report
    as_kept(report.headline())
    text = " ".join(str(report).split())
    assert SENTENCE in text and "non-finite." not in text
    assert is_of_flag(report.verdict)
    train_step(model, optimizer, third)  # it was cleared when the step began
    assert not guard.last_step_skipped and guard.num_skipped == 1
    assert device.num_read == 3


def test_a_bad_tensor_is_named_before_the_flag(model, optimizer, device):
    OverflowGuard(model, optimizer, explain=False)
    (batch,) = batches(1)
    device.is_set = True
    with pytest.raises(NonFiniteError) as caught:
        train_step(model, optimizer, (batch[0] * torch.nan, batch[1]))
    assert caught.value.report.verdict.first.kind == "input"
    assert not is_of_flag(caught.value.report.verdict)


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
@pytest.mark.explains
def test_the_explanation_names_no_operation(device, options, as_kept):
    model, optimizer = saturating()
    OverflowGuard(model, optimizer, **options)
    first, second = batches(2)
    train_step(model, optimizer, first)
    with pytest.raises(NonFiniteError) as caught:
        train_step(model, optimizer, large(second))
    found = caught.value.report.explanation
    assert found.op is None and found.cause == "unknown"
    as_kept(found.notes)


def test_a_flag_that_cannot_be_read_is_given_up(device, caplog, as_kept):
    def fail():
        raise RuntimeError("Unsupported api")

    flags.register("cpu", clear=device.clear, read=fail)
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer)
    for batch in batches(2):
        train_step(model, optimizer, batch)
    assert guard.step == 2 and guard.coverage().failures == 0
    as_kept(caplog.messages)


def test_the_scaler_is_left_its_flag(model, optimizer, device):
    guard = OverflowGuard(model, optimizer, on_overflow="skip", explain=False)
    scaler = torch.amp.GradScaler("cpu")
    (batch,) = batches(1)
    scaler.scale(model(batch[0], y=batch[1])["loss"]).backward()
    device.is_set = True
    scaler.step(optimizer)
    assert guard.last_report is None and device.num_read == 0


def test_check_asks_too_and_other_devices_are_not_asked(model, device):
    guard = OverflowGuard(model, on_overflow="warn", explain=False)
    other = Device()
    flags.register("npu", clear=other.clear, read=other.read)
    try:
        model(*batches(1)[0])
        device.is_set = True
        assert is_of_flag(guard.check().verdict)
    finally:
        flags.unregister("npu")
    assert other.num_read == other.num_cleared == 0


def test_what_cannot_be_registered_is_refused(as_kept):
    def call(arguments):
        device_type, clear, read = arguments
        flags.register(device_type, clear=clear, read=read)

    as_kept.errors(call, [(3, print, print), ("npu", None, print), ("npu", print, 1)])
    assert overflow_fast.flags is flags
