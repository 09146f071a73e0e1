"""Models as other libraries and torch's other modes leave them."""

import copy
import functools
import logging

import pytest
import torch
from guarding import INF, NAN, Net, batches, make, plant, train, train_step
from torch import nn

from overflow_fast import DebugUnderflowOverflow, OverflowGuard

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compiled"),
    pytest.mark.filterwarnings("ignore"),
]


def frames_of(model, *args, **kwargs):
    with DebugUnderflowOverflow(model) as detector:
        model(*args, **kwargs)
        return list(detector.frames)


# torch.func.


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sum()


@pytest.mark.parametrize(
    "transform, backend",  # torch 2.13 fails to compile this jvp by itself
    [(t, b) for t in ("vmap", "grad", "jvp") for b in (None, "aot_eager")][:-1],
)
def test_transforms_of_functions_are_not_scanned_and_said_so(
    transform, backend, caplog, as_kept
):
    model = Small()
    detector = DebugUnderflowOverflow(model)

    def run(x):
        if transform == "vmap":
            return torch.func.vmap(model)(x)
        if transform == "grad":
            return torch.func.grad(model)(x[0])
        return torch.func.jvp(model, (x[0],), (x[1],))[1]

    expected = run(torch.ones(3, 4))
    function = run if backend is None else torch.compile(run, backend=backend)
    torch.testing.assert_close(function(torch.ones(3, 4)), expected)
    reasons = detector.coverage.not_scanned
    assert reasons.get("inside a torch.func transform", 0) > 0
    as_kept(caplog.messages)


# What becomes of modules after attaching.


def test_a_module_that_is_replaced_is_not_watched_and_said_so(model, optimizer, caplog):
    with OverflowGuard(model, optimizer, "warn") as guard:
        train(model, optimizer, batches(1))
        model.blocks[1].fc1 = nn.Linear(8, 16)
        model.blocks[1].fc1.weight.data[0, 0] = INF
        train_step(model, optimizer, batches(1)[0])
    verdict = guard.last_report.verdict
    # Its parameter is listed, its call is not.
    assert verdict.first.fqn in ("blocks.1.fc1.weight", "blocks.1.act")


@pytest.mark.parametrize("change", ["half", "double", "cast one", "move"])
def test_a_model_that_is_cast_or_moved_after_attaching(model, optimizer, change):
    model.eval()
    with OverflowGuard(model, optimizer, "warn") as guard:
        if change == "half":
            model.bfloat16()
        elif change == "double":
            model.double()
        elif change == "move":
            model.to("meta").to_empty(device="cpu")
            for tensor in model.state_dict().values():
                tensor.data.fill_(0.1)
        else:
            model.blocks[0].double()
            model.blocks[0].register_forward_pre_hook(lambda m, a: a[0].double())
            model.blocks[0].register_forward_hook(lambda m, a, out: out.float())
        dtype = model.head.weight.dtype
        x, y = batches(1)[0]
        with plant(model.blocks[1].fc1, NAN):
            model(x.to(dtype), y=y.to(dtype))["loss"].backward()
        guard.check()
    first = guard.last_report.verdict.first
    assert first.fqn == "blocks.1.fc1"
    assert first.dtype == str(dtype)[6:]


def test_a_copy_of_a_watched_model_can_be_compiled(model, optimizer):
    model.eval()
    x, y = batches(1)[0]
    with OverflowGuard(model, optimizer, "warn") as guard:
        copied = copy.deepcopy(model)
        compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            found = compiled(x, y=y)["out"]
        assert guard.coverage().tensors_listed == 0
    torch.testing.assert_close(found, model(x, y=y)["out"])


# Parts that run without Python, or hold no ordinary weights.


def test_scripted_modules_are_not_seen_and_said_so(model, optimizer, caplog, as_kept):
    model.blocks[1] = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard = OverflowGuard(model, optimizer, "warn")
    as_kept(caplog.messages)
    with guard:
        train(model, optimizer, batches(1))
        assert guard.last_report is None
        model.blocks[1][0].weight.data.fill_(3e38)
        x, y = batches(1)[0]
        train_step(model, optimizer, (x * 1e3, y))
    # The weight is seen, and then what the scripted module made of it.
    assert guard.last_report.verdict.first.fqn in ("blocks.2.fc1", "blocks.2")


@pytest.mark.parametrize("watch", [DebugUnderflowOverflow, OverflowGuard])
def test_a_scripted_model_is_refused(watch, as_kept):
    as_kept.error(TypeError, watch, torch.jit.script(nn.Linear(2, 2)))


def test_a_traced_copy_runs_without_hooks():
    model = Small()
    detector = DebugUnderflowOverflow(model)
    traced = torch.jit.trace(model, torch.ones(4))
    calls = detector.total_calls
    torch.testing.assert_close(
        traced(torch.ones(4)), Small.forward(model, torch.ones(4))
    )
    assert detector.total_calls == calls + 1


def test_dynamically_quantized_layers(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    frames = frames_of(quantized, torch.ones(1, 4))
    # The weights are packed, and no parameters: only what goes in and out is listed.
    assert "weight" not in frames[0]
    assert "output" in frames[0]
    assert "not scanned" not in "".join(frames)


def test_torchaos_quantized_weights_are_not_scanned_and_said_so(caplog, as_kept):
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    as_kept(frames_of(model, torch.ones(1, 32))[0])
    assert "tensor subclass" in caplog.text


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_torchaos_float8_training(backend):
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    config = float8.Float8LinearConfig(emulate=True)
    model = float8.convert_to_float8_training(model, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = model if backend is None else torch.compile(model, backend=backend)
    with OverflowGuard(model, optimizer, "warn") as guard:
        for step in range(2):
            with plant(model[2], INF) if step else plant(model[2], 1.0):
                run(torch.ones(16, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert (guard.last_report is None) is (step == 0)
    assert guard.last_report.verdict.origin.maker == "2"
    assert guard.last_report.verdict.first.kind == "output"


# Other libraries.


def test_peft_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        Net(), peft.LoraConfig(target_modules=["fc1"], r=2, init_lora_weights=False)
    )
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    with OverflowGuard(model, optimizer, "warn") as guard:
        train(model, optimizer, batches(1))
        assert guard.last_report is None
        adapter = model.base_model.model.blocks[1].fc1.lora_B["default"]
        with plant(adapter, INF):
            train_step(model, optimizer, batches(1)[0])
    name = "base_model.model.blocks.1.fc1.lora_B.default"
    assert guard.last_report.verdict.origin.maker == name


def test_weights_that_accelerate_has_offloaded_are_not_scanned_and_said_so(caplog):
    accelerate = pytest.importorskip("accelerate")
    model, _ = make()
    model.eval()
    x, y = batches(1)[0]
    expected = model(x, y=y)["out"]
    detector = DebugUnderflowOverflow(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(model(x, y=y)["out"], expected.detach())
    assert set(detector.coverage.not_scanned) == {"meta tensor"}
    assert "meta tensor" in caplog.text
    assert any("output" in frame for frame in detector.frames)


def test_a_device_map_of_accelerate(model, optimizer):
    accelerate = pytest.importorskip("accelerate")
    accelerate.dispatch_model(model, device_map={"": "cpu"})
    with OverflowGuard(model, optimizer, "warn") as guard:
        with plant(model.blocks[1].fc1, INF):
            train_step(model, optimizer, batches(1)[0])
    assert guard.last_report.verdict.origin.maker == "blocks.1.fc1"


# Autograd that is compiled.


def test_compiled_autograd_is_reported_where_it_leaves_gradients_out(caplog, as_kept):
    def run(is_compiled):
        torch._dynamo.reset()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with OverflowGuard(model, optimizer, "warn") as guard:
            for _ in range(2):
                loss = model(torch.ones(1, 2)).sum()
                if is_compiled:
                    compiler = functools.partial(torch.compile, backend="eager")
                    with torch._dynamo.compiled_autograd._enable(compiler):
                        loss.backward()
                else:
                    loss.backward()
                optimizer.step()
        return guard.coverage().not_scanned

    assert run(is_compiled=False) == {}
    as_kept(run(is_compiled=True))
    assert "compiled autograd" in caplog.text


# CUDA graphs of torch's own.


@pytest.mark.cuda
def test_graphed_callables_refuse_hooks_and_can_be_watched_from_outside():
    inner = nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    detector = DebugUnderflowOverflow(inner)
    with pytest.raises(RuntimeError, match="hooks"):
        torch.cuda.make_graphed_callables(inner, (x,))
    detector.remove()
    graphed = torch.cuda.make_graphed_callables(inner, (x,))
    model = nn.Sequential(graphed, nn.ReLU())
    with DebugUnderflowOverflow(model) as detector:
        model(x)
        assert "0 Linear" in "".join(detector.frames)


@pytest.mark.cuda
def test_reduce_overhead_replays_are_judged(model, optimizer):
    model.cuda().eval()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    data = [tuple(t.cuda() for t in batch) for batch in batches(6)]
    with OverflowGuard(model, optimizer, "warn") as guard:
        train(compiled, optimizer, data)
        assert guard.last_report is None
        model.blocks[1].fc1.weight.data.fill_(3e38)
        train_step(compiled, optimizer, (data[0][0] * 1e3, data[0][1]))
    assert guard.last_report.verdict.origin.maker == "blocks.1.fc1"


class Scaled(nn.Module):
    """Has a hook that TorchScript can compile."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.register_forward_hook(doubled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Unscriptable(nn.Module):
    def forward(self, x):
        return [*x, *{}]


def doubled(self, x: tuple[torch.Tensor], y: torch.Tensor):
    return 2 * y


WATCHES = {
    "detector": DebugUnderflowOverflow,
    "guard": lambda model: OverflowGuard(model, explain=False),
    "trained": lambda m: OverflowGuard(m, torch.optim.SGD(m.parameters()), "warn"),
    "tripwire": lambda model: OverflowGuard(model, watch="tripwire", explain=False),
    "gradients": lambda model: OverflowGuard(model, watch=["gradients"], explain=False),
}


@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("part", ["", "inner", "inner.0"])
def test_a_watched_module_is_scripted_without_the_hooks_of_a_watch(watch, part):
    create = torch.jit._recursive.create_script_module
    model, x = Scaled(), torch.ones(2, 3)
    before = [len(m._forward_hooks) for m in model.modules()]
    watching = WATCHES[watch](model)
    hooked = [list(m._forward_hooks) for m in model.modules()]
    module = model.get_submodule(part)
    made = torch.jit.script(module)
    assert [list(m._forward_hooks) for m in model.modules()] == hooked
    with torch.no_grad():
        assert torch.equal(made(x), module(x))
    hooked = [list(m._forward_hooks) for m in model.modules()]  # one for a lone call
    assert not any("overflow_fast" in str(h) for h in made._forward_hooks.values())
    model.inner.append(Unscriptable())
    with pytest.raises(RuntimeError):
        torch.jit.script(model)
    del model.inner[2]
    assert [list(m._forward_hooks) for m in model.modules()] == hooked
    watching.remove()
    assert [len(m._forward_hooks) for m in model.modules()] == before
    assert torch.jit._recursive.create_script_module is create
