"""keep_in_fp32: chosen modules run in float32."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from assembled import Assembled
from containers import CONTAINERS, FEW
from containers import Model as Holding
from guarding import hooks_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from overflow_fast import OverflowGuard, keep_in_fp32

pytestmark = pytest.mark.xdist_group("compiled")


class Seen(nn.Linear):
    def forward(self, x, scale=None):
        self.dtypes = x.dtype, self.weight.dtype
        out = super().forward(x)
        return out if scale is None else out * scale


def make(dtype=None):
    torch.manual_seed(0)
    model = nn.Sequential(Seen(4, 4), nn.ReLU(), Seen(4, 4), Seen(4, 2))
    return model if dtype is None else model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_half_precision_model(dtype):
    model = make(dtype)
    with keep_in_fp32(model, ["2"]) as handle:
        assert handle.names == ["2"]
        out = model(torch.ones(3, 4, dtype=dtype))
        assert out.dtype == dtype
        out.sum().backward()
    assert model[0].dtypes == (dtype, dtype)
    assert model[2].dtypes == (torch.float32, torch.float32)
    assert model[3].dtypes == (dtype, dtype)
    assert model[2].weight.grad.dtype == torch.float32
    assert hooks_of(model) == 0


def test_under_autocast():
    model = make()
    dtypes = []
    with keep_in_fp32(model, ["2"]):
        model[2].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        model[3].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.ones(3, 4))
            assert torch.is_autocast_enabled("cpu")
    assert dtypes == [torch.float32, torch.bfloat16]
    assert model[2].dtypes == (torch.float32, torch.float32)


def test_keyword_inputs_and_nested_outputs():
    class Two(nn.Module):
        def forward(self, *, x):
            return {"y": x * 2, "n": x.long()}

    model = nn.ModuleDict({"a": Two()})
    with keep_in_fp32(model, ["a"]):
        out = model["a"](x=torch.full((2,), 4e4, dtype=torch.float16))
    assert out["y"].dtype == torch.float16
    assert out["n"].dtype == torch.int64


def test_an_exception_leaves_autocast_as_it_was():
    model = make()
    with keep_in_fp32(model, ["2"]), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            model[2](torch.ones(3, 5))
        assert torch.is_autocast_enabled("cpu")
        model(torch.ones(3, 4))


def test_patterns_and_copies():
    model = make(torch.bfloat16)
    handle = keep_in_fp32(model, ["[02]"])
    assert handle.names == ["0", "2"]
    other = copy.deepcopy(model)
    other(torch.ones(1, 4, dtype=torch.bfloat16))
    assert other[2].dtypes == (torch.float32, torch.float32)
    handle.remove()
    handle.remove()
    assert hooks_of(model) == 0


# Where values stay in float32.


def overflowing():
    """`wo` overflows in float16; the norm makes it small again."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("wi", nn.Linear(4, 4))
    model.add_module("wo", nn.Linear(4, 4))
    model.add_module("drop", nn.Dropout(0.0))
    model.add_module("norm", nn.LayerNorm(4))
    model.add_module("head", nn.Linear(4, 2))
    model.wo.weight.data.mul_(1e6)
    return model


@pytest.mark.parametrize("is_autocast", [False, True])
def test_values_stay_in_float32_until_they_are_small(is_autocast):
    model = overflowing()
    x = torch.ones(3, 4)
    if not is_autocast:
        model.wo.weight.data.div_(100)  # it must fit as a weight
        model.wi.weight.data.mul_(100)
        model, x = model.half(), x.half()
    dtypes = {}
    with torch.autocast("cpu", torch.float16, enabled=is_autocast):
        assert not model(x).isfinite().all()
        with keep_in_fp32(model, ["wo"], until=["no?m"]) as handle:
            assert handle.names == ["wo"]
            for name, module in model.named_children():
                module.register_forward_hook(
                    lambda m, a, out, n=name: dtypes.__setitem__(n, out.dtype)
                )
            out = model(x)
    assert out.isfinite().all()
    half = torch.float16
    out_of_norm = torch.float32 if is_autocast else half
    assert list(dtypes.values()) == [
        *(half, torch.float32, torch.float32),
        *(out_of_norm, half),
    ]
    out.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_without_an_end_outputs_stay_in_float32():
    model = make(torch.float16)
    keep_in_fp32(model, ["3"], until=[])
    assert model(torch.ones(1, 4).half()).dtype == torch.float32


def test_a_norm_without_weights_returns_the_models_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False))
    model.bfloat16()
    keep_in_fp32(model, ["0"], until=["1"])
    assert model(torch.ones(1, 4).bfloat16()).dtype == torch.bfloat16


def test_a_module_within_a_chosen_one_is_left_to_it():
    model = nn.Sequential(nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4))).half()
    handle = keep_in_fp32(model, ["0", "0.*"])
    assert handle.names == ["0", "0.0", "0.1"]
    assert model(torch.tensor([1])).dtype == torch.float16
    handle.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


# Weights.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(5, 4), Seen(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def test_a_module_that_shares_a_weight_runs_in_float32_too():
    model = Tied().bfloat16()
    handle = keep_in_fp32(model, ["head"])
    assert handle.names == ["embed", "head"]
    assert model.head.weight is model.embed.weight
    out = model(torch.tensor([1, 2]))
    out.float().sum().backward()
    assert model.body.dtypes == (torch.bfloat16, torch.bfloat16)
    assert out.dtype == torch.bfloat16


def test_a_shared_weight_of_a_module_with_others_is_reported(as_kept):
    model = Tied().bfloat16()
    model.body.embed_weight = model.embed.weight
    as_kept.error(ValueError, keep_in_fp32, model, ["head"])
    assert model.head.weight.dtype == torch.bfloat16  # nothing was changed
    assert "forward" not in model.head.__dict__


def test_gradients_are_cast_with_their_weights():
    model = make(torch.bfloat16)
    x = torch.ones(3, 4).bfloat16()
    model(x).sum().backward()
    keep_in_fp32(model, ["2"])
    assert model[2].weight.grad.dtype == torch.float32
    model(x).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def test_weights_that_cannot_be_cast_are_reported(as_kept):
    lazy = nn.Sequential(nn.LazyLinear(4, dtype=torch.float16))
    as_kept.error(ValueError, keep_in_fp32, lazy, ["0"])

    class DistributedDataParallel(nn.Module):  # as torch's is recognized
        def __init__(self, module):
            super().__init__()
            self.module = module

    with pytest.raises(ValueError) as raised:
        keep_in_fp32(DistributedDataParallel(make(torch.float16)), ["2"])
    as_kept(raised.value)
    nested = nn.Linear(2, 2)
    nested.weight = nn.Parameter(
        torch.nested.nested_tensor(
            [torch.ones(2).half(), torch.ones(3).half()], layout=torch.jagged
        )
    )
    as_kept.error(ValueError, keep_in_fp32, nn.Sequential(nested), ["0"])


def test_weights_on_meta():
    model = make(torch.float16).to("meta")
    keep_in_fp32(model, ["2"])
    assert model(torch.ones(1, 4, device="meta").half()).dtype == torch.float16


# The forward that is replaced.


def patch(module, log):
    """Replaces a forward on the instance, as Accelerate does."""
    before = module.forward

    def forward(*args, **kwargs):
        log.append(args[0].dtype)
        return before(*args, **kwargs)

    module.forward = forward
    return forward


def test_what_was_there_before_is_put_back():
    model, log, x = make(torch.float16), [], torch.ones(1, 4).half()
    forward = patch(model[2], log)
    handle = keep_in_fp32(model, ["2"])
    model(x)
    handle.remove()
    assert model[2].__dict__["forward"] is forward
    assert log == [torch.float32]
    assert "_replicate_for_data_parallel" not in model[2].__dict__


def test_what_was_put_over_it_stays():
    model, log, x = make(torch.bfloat16), [], torch.ones(1, 4).bfloat16()
    before = model(x)
    handle = keep_in_fp32(model, ["2"])
    forward = patch(model[2], log)
    handle.remove()
    model.bfloat16()
    assert model[2].__dict__["forward"] is forward
    assert torch.equal(model(x), before)
    assert model[2].dtypes == (torch.bfloat16, torch.bfloat16)
    assert log == [torch.bfloat16]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_handles_on_a_module(order):
    model, x = make(torch.bfloat16), torch.ones(1, 4).bfloat16()
    names = dict(model[2].__dict__)
    handles = [keep_in_fp32(model, ["2"]), keep_in_fp32(model, ["2"], until=[])]
    handles[order[0]].remove()
    is_last = order[0] == 0
    assert model[2](x).dtype == (torch.float32 if is_last else torch.bfloat16)
    handles[order[1]].remove()
    assert model[2].__dict__.keys() == names.keys() | {"dtypes"}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_runs_its_own_weights(copied):
    model, x = make(torch.float16), torch.ones(1, 4).half()
    keep_in_fp32(model, ["2"])
    other = copied(model)
    with torch.no_grad():
        model[2].weight.fill_(0)
    assert not torch.equal(other(x), model(x))
    assert other[2].dtypes == (torch.float32, torch.float32)
    assert other.state_dict().keys() == model.state_dict().keys()


def test_a_replica_of_data_parallel_runs_its_own_weights():
    model, x = make(torch.float16), torch.ones(1, 4).half()
    keep_in_fp32(model, ["2"])
    keep_in_fp32(model, ["2"])
    replica = model[2]._replicate_for_data_parallel()
    replica.weight = torch.zeros(4, 4)
    replica.bias = torch.ones(4)
    assert torch.equal(replica(x), torch.ones(1, 4).half())


def test_a_replica_keeps_what_was_put_over_it():
    model, log, x = make(torch.float16), [], torch.ones(1, 4).half()
    keep_in_fp32(model, ["2"])
    patch(model[2], log)
    model[2]._replicate_for_data_parallel()(x)
    assert log == [torch.float16]


def test_the_signature_is_the_modules():
    model = make()
    keep_in_fp32(model, ["2"])
    assert list(inspect.signature(model[2].forward).parameters) == ["x", "scale"]


def test_threads_run_it_at_once():
    model = make()
    keep_in_fp32(model, ["2"])
    xs = [torch.randn(3, 4) for _ in range(16)]

    def call(i):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            return model[2](xs[i]).dtype, torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, range(16)))
    assert found == [(torch.float32, i % 2 == 0) for i in range(16)]


def test_inputs_that_need_no_cast_are_handed_on_as_they_are():
    class Appends(nn.Module):
        def forward(self, x, out):
            out.append(x)
            return out

    model = nn.ModuleDict({"a": Appends()})
    keep_in_fp32(model, ["a"], until=[])
    out = []
    assert model["a"](torch.ones(1), out) is out
    assert len(out) == 1


def test_jit_trace():
    model, x = make(torch.bfloat16), torch.ones(3, 4).bfloat16()
    keep_in_fp32(model, ["2"])
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


# Compiled.


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.norm = Seen(4, 4), Scaled(4, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)
        self.is_checkpointed = False

    def forward(self, x):
        x = torch.relu(self.fc1(x))
        if self.is_checkpointed:
            x = checkpoint(self.fc2, x, scale=2.0, use_reentrant=False)
        else:
            x = self.fc2(x, scale=2.0)
        return self.head(self.norm(x))


COMPILED = {
    "model": lambda net, **how: torch.compile(net, **how),
    "module": lambda net, **how: net.compile(**how) or net,
    "function": lambda net, **how: torch.compile(lambda x: net(x), **how),
    "child": lambda net, **how: net.fc2.compile(**how) or net,
    "checkpointed": lambda net, **how: torch.compile(net, **how),
}


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: (
        torch._dynamo.utils.counters["stats"]["unique_graphs"],
        dict(torch._dynamo.utils.counters["graph_break"]),
    )
    torch._dynamo.reset()


def half_net(is_autocast):
    torch.manual_seed(0)
    return Net() if is_autocast else Net().bfloat16()


def run_net(net, is_autocast):
    x = torch.linspace(-1, 1, 12).view(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out = net(x if is_autocast else x.bfloat16())
    out.float().sum().backward()
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, fullgraph, is_autocast",
    [
        ("model", True, False),
        ("model", False, True),
        ("module", True, True),
        ("function", True, False),
        ("child", True, True),
        ("checkpointed", True, False),
    ],
)
def test_it_compiles_in_one_graph(graphs, what, fullgraph, is_autocast):
    net = half_net(is_autocast)
    net.is_checkpointed = what == "checkpointed"
    keep_in_fp32(net, ["fc2"], until=["norm"])
    eager = copy.deepcopy(net)
    how = {"backend": "aot_eager", "fullgraph": fullgraph}
    out = run_net(COMPILED[what](net, **how), is_autocast)
    assert torch.equal(out, run_net(eager, is_autocast))
    assert net.fc2.weight.grad.dtype == torch.float32
    close = {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(net.fc2.weight.grad, eager.fc2.weight.grad, **close)
    assert graphs() == (1, {})


@pytest.mark.slow
def test_compiled_code_notices_that_it_comes_and_goes(graphs):
    net = half_net(True)
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    without = run_net(run, True)
    handle = keep_in_fp32(net, ["fc2"])
    assert torch.equal(run_net(run, True), run_net(net, True))
    assert not torch.equal(run_net(run, True), without)
    handle.remove()
    assert torch.equal(run_net(run, True), without)


@pytest.mark.slow
def test_compiled_code_serves_autocast_on_and_off(graphs):
    net = half_net(True)
    keep_in_fp32(net, ["fc2"])
    run = torch.compile(net, backend="aot_eager", fullgraph=True)
    for is_on in (True, False, True):
        x = torch.ones(3, 4)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            assert torch.equal(run(x), net(x))


@pytest.mark.slow
def test_a_guard_sees_what_the_module_returns(graphs):
    for compiles in (False, True):
        model = overflowing().half()
        model.wo.weight.data.fill_(3e4)
        model.wi.weight.data.fill_(30.0)
        keep_in_fp32(model, ["wo"], until=["norm"])
        x = torch.ones(3, 4).half()
        run = torch.compile(model, backend="aot_eager") if compiles else model
        with OverflowGuard(model, on_overflow="warn") as guard:
            run(x)
            assert guard.check() is None
            row = next(r for r in guard.headroom().rows if r.where == "output of wo")
        assert row.dtype == "float32"
        assert row.abs_max > 65504


def test_wrong_arguments_are_reported(as_kept):
    as_kept.error(TypeError, keep_in_fp32, 3, ["2"])
    as_kept.error(TypeError, keep_in_fp32, make(), "2")
    as_kept.error(TypeError, keep_in_fp32, make(), ["2"], until="3")
    as_kept.error(ValueError, keep_in_fp32, make(), ["2"], until=["x"])
    as_kept.error(ValueError, keep_in_fp32, make(), ["x"])


@pytest.mark.parametrize("kind", FEW)
def test_modules_in_float32_get_and_return_what_they_should(kind):
    model = Holding(kind).half()
    keep_in_fp32(model, ["block"])
    x = torch.randn(2, 4).half()
    assert model(x).dtype == torch.float16
    assert model.block.seen == torch.float32
    given = CONTAINERS[kind].make(x)
    made = model.block(given)
    assert CONTAINERS[kind].get(made).dtype == torch.float16
    assert CONTAINERS[kind].get(given) is x


class Cache:
    """Is updated by the modules that it is given to."""

    def __init__(self):
        self.keys = torch.zeros(2, 0, dtype=torch.float16)
        self.fixed = torch.zeros(2, 3, dtype=torch.float16)
        self.untouched = torch.ones(1, dtype=torch.float16)
        self.history = [torch.ones(1, dtype=torch.float16)]
        self.by_name = {"first": torch.ones(1, dtype=torch.float16)}
        self.num_calls = 0


class Caching(Assembled):
    def forward(self, x, cache):
        cache.keys = torch.cat([cache.keys, self.lin(x)], 1)
        cache.fixed[:, 1] = 2
        cache.history.append(cache.keys)
        cache.by_name["keys"] = cache.keys
        cache.num_calls += 1
        return self.lin(x), cache


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_cache_is_updated_by_a_module_in_float32(is_inference):
    class Outer(Assembled):
        def forward(self, x, cache):
            return self.inner(x, cache)

    model = Outer(inner=Caching(lin=nn.Linear(4, 4))).half()
    keep_in_fp32(model, ["inner"])
    with torch.inference_mode(is_inference):
        cache = Cache()
        untouched, history = cache.untouched, cache.history
        for _ in range(2):
            output, returned = model(torch.randn(2, 4).half(), cache)
    assert output.dtype == torch.float16
    assert cache.num_calls == returned.num_calls == 2
    assert cache.keys.shape == (2, 8)
    assert cache.fixed.dtype == torch.float16
    assert cache.fixed[:, 1].tolist() == [2, 2]
    assert cache.untouched is untouched
    assert cache.history is history
    assert len(history) == 3
    assert list(cache.by_name) == ["first", "keys"]
