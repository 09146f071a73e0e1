"""Where this differs from transformers on purpose: the table of docs/differences.md."""

import dataclasses
import math

import pytest
import torch
from parity import Original, check_parity, run, small_model, spoil
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import DebugUnderflowOverflow, scan

DETECTED = "inf/nan detected"


@dataclasses.dataclass
class Fields:
    loss: torch.Tensor
    name: str = "kept"
    nothing: None = None


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, *inputs, **named):
        return self.make(*inputs, **named)


def once(*inputs, **named):
    return lambda model, detector: model(*inputs, **named)


def run_both(make_model, drive, **arguments):
    """Stdout and error of the original, of ours, and of ours with strict_compat."""
    return (
        run(Original, make_model, drive),
        run(DebugUnderflowOverflow, make_model, drive, **arguments),
        run(DebugUnderflowOverflow, make_model, drive, strict_compat=True),
    )


INF = torch.tensor([1.0, math.inf])
BAD_OUTPUTS = {
    "output['logits']": lambda: {"logits": INF},
    "output[1]": lambda: [torch.ones(1), INF],
    "output.loss": lambda: Fields(INF),
    "output[0][0][1]": lambda: ((((torch.ones(1), INF)),),),
    "output['a'][0].loss": lambda: {"a": [Fields(INF)]},
}


@pytest.mark.parametrize("label", BAD_OUTPUTS)
def test_outputs_in_containers_are_looked_at(label):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Returns(BAD_OUTPUTS[label])

        def forward(self):
            self.child()

    original, ours, strict = run_both(Root, once())
    assert original == strict == ("", None)
    assert ours[0].startswith(f"{label} has infs\n")
    assert DETECTED in ours[1]


def test_containers_without_a_tensor_keep_their_line():
    def make():
        return nn.Sequential(Returns(lambda x: {"sizes": [1, 2], "name": "a"}))

    check_parity(make, once(torch.ones(1)), trace_batch_nums=[0])


def test_keyword_inputs_are_listed_when_bad():
    def make():
        return Returns(lambda x, hidden, extra: torch.ones(1))

    clean = once(torch.ones(1), hidden=torch.ones(1), extra={"a": torch.ones(1)})
    original, ours, strict = run_both(make, clean)
    assert original == ours == strict
    bad = once(torch.ones(1), hidden=torch.ones(1), extra={"a": INF})
    original, ours, strict = run_both(make, bad)
    assert original == strict == ("", None)
    assert ours[0].startswith("input.extra['a'] has infs\n")
    assert "1.00e+00      inf input.extra['a']" in ours[0]
    assert "input.hidden" not in ours[0]


def test_keyword_inputs_are_all_listed_on_request():
    model = Returns(lambda x, hidden: x)
    detector = DebugUnderflowOverflow(model, list_kwargs=True)
    model(torch.ones(1), hidden=torch.ones(1))
    assert "1.00e+00 1.00e+00 input.hidden" in detector.frames[-1]


def test_tuples_and_lists_among_the_inputs_are_looked_at(as_kept):
    def make():
        return Returns(lambda pair: torch.ones(1))

    original, ours, strict = run_both(make, once((torch.ones(1), [INF])))
    assert original == strict == ("", None)
    assert ours[0].startswith("input[0][1][0] has infs\n")
    as_kept(ours[0])


def test_an_additive_mask_is_no_alarm_unless_passed_by_position():
    mask = torch.tensor([0.0, -math.inf])

    def make():
        return Returns(lambda x, mask=None: x)

    by_name = once(torch.ones(1), mask=mask)
    assert run(DebugUnderflowOverflow, make, by_name) == ("", None)
    for bad in (torch.tensor([math.inf, -math.inf]), torch.tensor([math.nan])):
        error = run(DebugUnderflowOverflow, make, once(torch.ones(1), mask=bad))[1]
        assert DETECTED in error
    by_place = once(torch.ones(1), mask)
    assert DETECTED in check_parity(make, by_place, only_strict=True)[1]
    assert DETECTED in run(DebugUnderflowOverflow, make, by_place)[1]


UNSUPPORTED = {
    "bool": (torch.tensor([True]), "1.00e+00 1.00e+00"),
    "uint16": (torch.tensor([3], dtype=torch.uint16), "3.00e+00 3.00e+00"),
    "uint64": (torch.tensor([2**63], dtype=torch.uint64), "9.22e+18 9.22e+18"),
    "float8": (torch.tensor([448.0]).to(torch.float8_e4m3fn), "4.48e+02 4.48e+02"),
    "empty": (torch.ones(0, 3), "            empty"),
    "sparse": (torch.tensor([0.0, 7.0]).to_sparse(), "7.00e+00 7.00e+00"),
    "meta": (torch.ones(2, device="meta"), "      not scanned"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("strict", [False, True])
def test_tensors_that_the_original_crashes_on_get_a_line(name, strict):
    tensor, line = UNSUPPORTED[name]
    with pytest.raises((RuntimeError, IndexError, TypeError)):
        model = nn.Identity()
        Original(model)
        model(tensor)
    model = nn.Identity()
    detector = DebugUnderflowOverflow(model, strict_compat=strict)
    model(tensor)
    why = ": meta tensor" if name == "meta" else ""
    assert detector.frames[-1].endswith(f"\n{line} input[0]{why}\n{line} output{why}")


def test_the_smallest_integer_has_its_magnitude():
    lowest = torch.tensor([-(2**31), 5], dtype=torch.int32)
    assert scan([lowest])[0][:2] == (5, 2**31)
    model = nn.Identity()
    detector = DebugUnderflowOverflow(model)
    model(lowest)
    assert detector.frames[-1].endswith("5.00e+00 2.15e+09 output")


def test_a_bad_root_is_reported_in_its_own_batch(as_kept):
    def make():
        return Returns(lambda x: x / 0)

    original, ours, strict = run_both(make, once(torch.ones(1)))
    assert original == strict
    as_kept(original[0])
    assert ours[0] == original[0].replace("batch_number=1", "batch_number=0")


def drive_after_a_caught_detection(model, detector):
    with torch.no_grad():
        good = model[0].weight.clone()
        spoil(model)
        with pytest.raises(ValueError, match=DETECTED):
            model(torch.ones(1, 4))
        model[0].weight.copy_(good)
    model(torch.ones(1, 4))


def test_a_caught_detection_is_not_raised_again():
    original, ours, strict = run_both(small_model, drive_after_a_caught_detection)
    assert original == strict
    assert DETECTED in original[1] and ours[1] is None


def drive_inf_in_a_traced_batch(model, detector):
    x = torch.ones(1, 4)
    model(x * math.inf)
    model(x)


def test_an_inf_in_a_traced_batch_is_not_blamed_on_the_next():
    def with_trace(detector, **arguments):
        drive = drive_inf_in_a_traced_batch
        return run(detector, small_model, drive, trace_batch_nums=[0], **arguments)

    original, strict = (
        with_trace(Original),
        with_trace(DebugUnderflowOverflow, strict_compat=True),
    )
    assert original == strict and DETECTED in original[1]
    assert with_trace(DebugUnderflowOverflow)[1] is None


def test_frames_stay_bounded_after_tracing():
    counts = []
    for detector, arguments in [
        (Original, {}),
        (DebugUnderflowOverflow, {}),
        (DebugUnderflowOverflow, {"strict_compat": True}),
    ]:
        model = small_model()
        watch = detector(model, 4, [0], **arguments)
        for _ in range(3):
            model(torch.ones(1, 4))
        counts.append(len(watch.frames))
    assert counts[0] == counts[2] > counts[1] == 4


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x):
        x = self.child(x)
        if x.shape[0] == 3:
            raise RuntimeError("three rows")
        return x


def drive_with_an_exception(model, detector):
    with pytest.raises(RuntimeError, match="three rows"):
        model(torch.ones(3, 4))
    spoil(model)
    model(torch.ones(2, 4))


def test_a_forward_that_raises_ends_its_batch(as_kept):
    original, ours, strict = run_both(Raises, drive_with_an_exception)
    assert original == strict
    assert "batch_number=0" in original[0] and "batch_number=1 " not in original[0]
    as_kept(ours[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.left, self.right = nn.Sequential(self.shared), nn.Sequential(self.shared)

    def forward(self, x):
        return self.left(x)


def test_a_module_under_two_parents_gives_one_frame():
    calls = []
    for detector, arguments in [
        (Original, {}),
        (DebugUnderflowOverflow, {}),
        (DebugUnderflowOverflow, {"strict_compat": True}),
    ]:
        model = Tied()
        watch = detector(model, **arguments)
        model(torch.ones(1, 4))
        calls.append(watch.total_calls)
    assert calls == [5, 3, 5]


class EqualToAll(nn.Module):
    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return True

    def forward(self, x):
        return x


@pytest.mark.parametrize("strict", [False, True])
def test_the_root_is_known_by_identity(strict):
    model = nn.Sequential(EqualToAll(), EqualToAll())
    detector = DebugUnderflowOverflow(model, strict_compat=strict)
    model(torch.ones(1))
    assert detector.batch_number == 1
    model = nn.Sequential(EqualToAll(), EqualToAll())
    original = Original(model)
    model(torch.ones(1))
    assert original.batch_number == 3


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x):
        return checkpoint(self.child, x, use_reentrant=False).sum()


def test_recomputed_frames_are_whole_and_marked():
    model = Checkpointed()
    detector = DebugUnderflowOverflow(model)
    model(torch.randn(2, 4)).backward()
    again = [f.splitlines() for f in detector.frames if " (recomputed)" in f]
    # torch stops the recomputation as soon as all that backward needs is there.
    assert [lines[0].split(maxsplit=1)[0] for lines in again] == ["child.0", "child.1"]
    labels = [line.split()[-1] for line in again[0][1:]]
    assert labels == ["weight", "bias", "input[0]", "output"]
    model(torch.randn(2, 4))
    second = next(f for f in detector.frames if "batch number=1" in f)
    assert "(recomputed)" not in second and "child.0 Linear" in second


def test_an_inf_in_a_recomputed_frame_is_reported_in_its_batch(capsys, as_kept):
    model = Checkpointed()
    DebugUnderflowOverflow(model)
    loss = model(torch.randn(2, 4))
    spoil(model)
    with pytest.raises(ValueError, match=DETECTED):
        loss.backward()
    as_kept(capsys.readouterr().out)


def test_the_scan_saves_nothing_for_backward():
    packs = {"original": 0, "ours": 0, "bare": 0}
    for name, detector in [
        ("bare", None),
        ("ours", DebugUnderflowOverflow),
        ("original", Original),
    ]:
        model = small_model()
        if detector:
            detector(model)

        def pack(tensor, name=name):
            packs[name] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(2, 4))
    assert packs["ours"] == packs["bare"] < packs["original"]


def test_the_outermost_call_is_the_batch_where_the_root_is_never_called():
    model = nn.ModuleDict({"backbone": small_model(), "head": nn.Linear(2, 2)})
    detector = DebugUnderflowOverflow(model, max_frames_to_save=None)
    for _ in range(3):
        model["head"](model["backbone"](torch.randn(2, 4)))
    assert detector.batch_number == 2
    headers = [f for f in detector.frames if "*** Starting batch number=" in f]
    assert len(headers) == 3


def test_replicas_do_not_crash():
    model = small_model()
    detector = DebugUnderflowOverflow(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(KeyError):
        watched = small_model()
        Original(watched)
        watched._replicate_for_data_parallel()(torch.randn(2, 4))
    replica(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert detector.batch_number == 2
    assert detector.model is model


def test_inside_a_transform_nothing_is_scanned_and_said_so(as_kept):
    model = nn.Linear(4, 4)
    detector = DebugUnderflowOverflow(model)
    torch.func.vmap(model)(torch.randn(3, 4))
    as_kept(detector.frames[-1])


def test_remove_and_the_context_manager():
    with pytest.raises(AttributeError):
        Original(nn.Identity()).remove()
    model = small_model()
    DebugUnderflowOverflow(model).remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("compile_first", [False, True])
def test_a_compiled_model_is_watched(compile_first):
    torch._dynamo.reset()
    model = small_model()
    if compile_first:
        model.compile(backend="eager")
        detector = DebugUnderflowOverflow(model)
    else:
        detector = DebugUnderflowOverflow(model)
        model.compile(backend="eager")
    expected = small_model()
    expected.load_state_dict(model.state_dict())
    x = torch.randn(2, 4)
    assert torch.equal(model(x), expected(x))
    assert detector.total_calls > 0
    spoil(model)
    with pytest.raises(ValueError, match=DETECTED):
        model(x)
