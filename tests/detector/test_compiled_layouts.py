"""Scans in compiled code take tensors as they lie, and change nothing around them."""

import re

import pytest
import torch
from assembled import Assembled
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.two_tensor import TwoTensor

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

pytestmark = [
    pytest.mark.xdist_group("compiled"),
    pytest.mark.usefixtures("fresh_compiler"),
]


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2


def convolutions():
    torch.manual_seed(0)
    stages = [
        nn.Sequential(
            nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        )
        for i in range(3)
    ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def saved_for_backward(is_guarded):
    """The dtypes and shapes of what compiled code keeps for backward."""
    kept = []

    def note(graph, _):
        outputs = (node.meta["val"] for node in graph.graph.output_node().args[0])
        kept.extend((each.dtype, tuple(each.shape)) for each in outputs)
        return make_boxed_func(graph.forward)

    model = convolutions()
    guard = OverflowGuard(model, on_overflow="warn") if is_guarded else None
    backend = aot_autograd(
        fw_compiler=note,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(model, backend=backend)(torch.randn(2, 3, 16, 16)).sum().backward()
    if guard is not None:
        guard.remove()
    handles_and_tokens = {(torch.int64, (1,)), (torch.float32, (0,))}
    return sorted(map(str, filter(lambda each: each not in handles_and_tokens, kept)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_saved_for_backward_is_what_is_saved_without_scans():
    assert saved_for_backward(True) == saved_for_backward(False)


def num_tensors(is_watched):
    """How many tensors of a shape compiled code makes in front of a convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Conv2d(8, 4, 3)).eval()
    detector = DebugUnderflowOverflow(model) if is_watched else None
    with torch.no_grad():
        _, (code,) = run_and_get_code(torch.compile(model), torch.randn(2, 8, 16, 16))
    if detector is not None:
        assert "overflow_fast.frame" in code
        detector.remove()
    return len(re.findall(r"empty_strided_cpu\(\(2, 8, 16, 16\)", code))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scan_in_front_of_a_convolution_takes_no_copy():
    assert num_tensors(is_watched=True) == num_tensors(is_watched=False) == 1


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "sliced": lambda x: x[:, ::2, 1:, :-1],
    "padded": lambda x: nn.functional.pad(x, (0, 5))[..., :-5],
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}


class Views(Assembled):
    """Gives modules inputs and outputs of each layout, and reads one as an image."""

    def forward(self, *inputs):
        made = [module(x) for module, x in zip(self.made, inputs, strict=True)]
        views = [change(x) for change, x in zip(LAYOUTS.values(), made, strict=True)]
        viewed = [module(x) for module, x in zip(self.viewed, views, strict=True)]
        return [self.conv(made[0]), *viewed]


def run_views(compiles, is_watched=True):
    """What frames list of a call, what it returns, and the gradients of its inputs."""
    torch.manual_seed(0)
    model = Views(
        made=nn.ModuleList(Scaled() for _ in LAYOUTS),
        viewed=nn.ModuleList(Scaled() for _ in LAYOUTS),
        conv=nn.Conv2d(8, 8, 3),
    )
    inputs = []
    for number, change in enumerate(LAYOUTS.values()):
        x = torch.randn(2, 8, 16, 16)
        for changed in (x, change(x)):
            changed[-1, -1, -1, -1] = 10.0 ** (9 + number)
            changed[0, 0, 0, 0] = 10.0 ** -(9 + number)
        inputs.append(x.requires_grad_())
    inputs[1] = LAYOUTS["channels last"](inputs[1].detach()).requires_grad_()
    detector = DebugUnderflowOverflow(model, max_frames_to_save=None)
    if not is_watched:
        detector.remove()
    outputs = (torch.compile(model) if compiles else model)(*inputs)
    sum(output.sum() for output in outputs).backward()
    frames = list(detector.frames)
    detector.remove()
    return frames, [x.detach() for x in outputs], [x.grad for x in inputs]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_layout_are_read_and_left_as_they_are():
    frames, outputs, gradients = run_views(compiles=True)
    assert frames == run_views(compiles=False)[0]
    _, bare_outputs, bare_gradients = run_views(compiles=True, is_watched=False)
    pairs = zip([*outputs, *gradients], [*bare_outputs, *bare_gradients], strict=True)
    for watched, bare in pairs:
        assert watched.stride() == bare.stride()
        assert watched.equal(bare)


def coverage_of_a_subclass(backend):
    """What frames list of a model that is given a tensor subclass, and leave out."""
    x = torch.full((3, 4), float("inf"))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    run = model if backend is None else torch.compile(model, backend=backend)
    with DebugUnderflowOverflow(model, max_frames_to_save=None) as detector:
        run(TwoTensor(x, x.clone()))
        return detector.frames[0], detector.coverage.not_scanned


@torch.no_grad()
def test_a_tensor_subclass_is_not_scanned_as_in_eager():
    torch.manual_seed(0)
    eager, missed = coverage_of_a_subclass(None)
    torch.manual_seed(0)
    assert coverage_of_a_subclass("aot_eager") == (eager, missed)
    assert list(missed) == ["tensor subclass TwoTensor"]
