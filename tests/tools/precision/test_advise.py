"""advise_precision: which layers can run in which dtype, verified by runs."""

import doctest
import random
from collections import OrderedDict

import numpy
import pytest
import torch
import torch.distributed as dist
from assembled import Assembled
from containers import CONTAINERS, FEW
from guarding import assert_same, hooks_of, make
from torch import nn
from torch.utils.checkpoint import checkpoint

import overflow_fast  # noqa: F401  (the code that is evaluated names it)
from overflow_fast import OverflowGuard, advise_precision, keep_in_fp32

OPTIONS = {"use_reentrant": False}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1)
    )


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def squares(model, x):
    return model(x).float().pow(2).mean()


def advise(model, *batches, loss=squares, **options):
    return advise_precision(model, list(batches or (data(6, 8),)), loss, **options)


def verdicts(advice):
    """Its text above the table of layers."""
    return str(advice).partition("  float16  error")[0]


def row_of(advice, name):
    return next(row for row in advice.rows if row.name == name)


def check_of(advice, dtype):
    return next(check for check in advice.checks if check.dtype == dtype)


def outlier():
    """The second layer's outputs are beyond float16, and made small again."""
    model = mlp()
    with torch.no_grad():
        model[2].weight *= 1e6
    return model


class Between(nn.Module):
    """Overflows float16 in the code of a module that has submodules."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        scores = (self.q(x) * 300) @ (self.k(x) * 300).transpose(-1, -2)
        return torch.softmax(scores * 1e-4, -1) @ x


def test_a_healthy_model_may_run_in_all():
    advice = advise(mlp(), data(6, 8), data(3, 8))
    assert advice.bfloat16 == advice.float16 == ["0", "1", "2", "3", "4"]
    assert advice.float32 == advice.not_seen == advice.notes == []
    assert (advice.dtype, advice.code) == ("bfloat16", "")
    for check in advice.checks:
        assert check.passed and check.finite and check.kept == [] and check.runs == 1
        assert 0 < check.gradient_difference < 0.1
        assert check.loss == pytest.approx(advice.loss, rel=0.01)
    for row in advice.rows:
        assert row.calls == 2
        assert all(0.2 < ratio < 3 for ratio in row.ratios.values())


def test_errors_are_those_of_the_layer_computed_by_hand():
    model, x = mlp(), data(6, 8)
    row = row_of(advise(model, x), "0")
    exact = model[0](x).detach().double()
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        weight, bias = model[0].weight.to(dtype), model[0].bias.to(dtype)
        found = nn.functional.linear(x.to(dtype), weight, bias).detach().double()
        error = float((found - exact).norm() / exact.norm())
        assert row.errors[name] == pytest.approx(error, rel=1e-9)
    assert row.inputs.abs_max == float(x.abs().max())
    assert row.weights.abs_max == float(model[0].weight.detach().abs().max())


def test_an_outlier_layer_stays_and_the_code_makes_float16_finite():
    model, x = outlier(), data(6, 8)
    advice = advise(model, x)
    assert "reaches" in row_of(advice, "2").reasons["float16"]
    assert (
        row_of(advice, "2").bits["float16"] < 0 < row_of(advice, "2").bits["bfloat16"]
    )
    assert advice.float16 == ["0", "1", "4"]
    assert advice.bfloat16 == ["0", "1", "2", "3", "4"]
    assert advice.code == "" and advice.dtype == "bfloat16"
    code = advice.codes["float16"]
    assert code == "overflow_fast.keep_in_fp32(model, ['2', '3'])"
    with torch.autocast("cpu", torch.float16):
        assert not model(x).isfinite().all()
    with eval(code), torch.autocast("cpu", torch.float16):
        assert model(x).isfinite().all()


def test_a_layer_norm_whose_inputs_hide_their_differences_stays():
    class Shifted(Assembled):
        def forward(self, x):
            return self.head(self.norm(x + 3000))

    advice = advise(Shifted(norm=nn.LayerNorm(8), head=nn.Linear(8, 1)))
    row = row_of(advice, "norm")
    assert row.bits["float16"] > 1  # within the range
    assert "what rounding explains" in row.reasons["float16"]
    assert "norm" in advice.float32 and "head" in advice.float16


def test_tiny_gradients_keep_a_layer_out_of_float16():
    class Two(Assembled):
        def forward(self, x):
            return self.a(x).float().sum() + 1e-12 * self.b(x).float().sum()

    model = Two(a=nn.Linear(8, 1), b=nn.Linear(8, 1))
    advice = advise(model, loss=lambda m, x: m(x))
    row = row_of(advice, "b")
    assert row.gradient_lost == 1.0
    assert "become 0" in row.reasons["float16"]
    assert "b" in advice.bfloat16 and "b" not in advice.float16
    assert advise(model, loss=lambda m, x: m(x), max_underflow=1.0).float16 == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("factor", [1.0, 1e-9, 2.0**12])
def test_the_loss_scale_is_the_largest_that_is_safe(factor):
    model = nn.Linear(8, 1, bias=False)
    x = torch.ones(1, 8)  # both gradients are the factor
    advice = advise(model, x, loss=lambda m, x: m(x).float().sum() * factor)
    largest = factor * advice.loss_scale
    assert largest <= 65504 / 2 < 2 * largest
    assert advice.loss_scale == 2.0 ** round(numpy.log2(advice.loss_scale))
    assert row_of(advice, "").output_gradients.abs_max == pytest.approx(factor)
    assert check_of(advice, "float16").passed


def test_what_stays_in_float32_does_not_lower_the_loss_scale():
    class Two(Assembled):
        def forward(self, x):
            return self.a(x).float().sum() + 1e3 * self.b(x).float().sum()

    model = Two(a=nn.Linear(8, 1), b=nn.Linear(8, 1))
    with torch.no_grad():
        model.b.weight *= 1e6
    advice = advise(model, loss=lambda m, x: m(x))
    assert advice.float16 == ["a"] and check_of(advice, "float16").passed
    assert row_of(advice, "b").output_gradients.abs_max * advice.loss_scale > 65504


def test_code_between_modules_is_found_by_the_run(as_kept):
    torch.manual_seed(0)
    model = nn.Sequential(Between(), nn.Linear(8, 1))
    advice = advise(model, data(2, 4, 8), max_underflow=1.0)
    check = check_of(advice, "float16")
    assert check.passed and check.widened == ["0"] and check.runs == 2
    assert advice.float16 == ["1"]  # what is within the module stays with it
    failed = advise(model, data(2, 4, 8), max_underflow=1.0, max_rounds=0)
    check = check_of(failed, "float16")
    assert (check.passed, check.finite, check.failure) == (False, False, "not finite")
    assert failed.float16 == [] and "float16" not in failed.codes
    as_kept(verdicts(failed))


class Rescaled(nn.Module):
    """A kept layer is given what code makes of another one's float16 output."""

    def __init__(self, before, after):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.kept = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1)
        self.before, self.after = before, after
        with torch.no_grad():
            self.kept.weight *= 1e6

    def forward(self, x):
        y = self.a(x) * self.before
        return self.head(self.norm(self.kept(y * self.after)))


def test_the_producer_of_a_kept_modules_input_that_overflows_is_kept():
    model, x = Rescaled(3e5, 1e-5), data(6, 8)
    row = row_of(advise(model, x), "kept")
    assert "output reaches" in row.reasons["float16"]
    check = check_of(advise(model, x), "float16")
    assert check.passed and check.widened == ["a"] and check.runs == 2
    check = check_of(advise(model, x, max_rounds=0), "float16")
    assert not check.passed and check.widened == []
    model.a = nn.Sequential(nn.Linear(8, 8), model.a)
    check = check_of(advise(model, x), "float16")
    assert check.passed and check.widened == ["a.1"]  # the one that returned last


@pytest.mark.parametrize("depth", [0, 3])
def test_the_producer_of_an_input_whose_gradient_overflows_is_kept_first(depth):
    """A smaller loss scale would make other gradients 0."""

    class Small(Rescaled):
        def forward(self, x):
            y = self.a(x)
            for _ in range(depth):
                y = y.reshape(2, -1).view_as(y).clone()
            return self.head(self.norm(self.kept(y * 1e-5) + x))

    model, x = Small(1.0, 1.0), data(6, 8)
    with torch.no_grad():
        model.kept.weight *= 1e3
    first = advise(model, x, max_rounds=0, max_underflow=1.0)
    assert not check_of(first, "float16").finite
    advice = advise(model, x, max_underflow=1.0)
    check = check_of(advice, "float16")
    assert check.passed and check.widened == ["a"] and check.runs == 2
    assert advice.loss_scale == first.loss_scale


def test_a_module_that_makes_bad_gradients_is_kept_before_the_scale_is_lowered():
    class Cube(nn.Module):
        """Finite, but the derivative of tanh is 0 times inf."""

        def forward(self, x):
            return x * (1 + torch.tanh(x + 0.04 * x**3))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Cube(), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight *= 300
    advice = advise(model, data(6, 8))
    check = check_of(advice, "float16")
    assert check.passed and check.widened == ["1"] and check.runs == 2


def test_gradients_that_overflow_elsewhere_lower_the_loss_scale():
    class Steep(Assembled):
        def forward(self, x):
            return self.b(_Steep.apply(self.a(x)))

    class _Steep(torch.autograd.Function):
        """Its gradient is large before it is small again: in none of the hooks."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2000 / 2000

    advice = advise(Steep(a=nn.Linear(8, 8), b=nn.Linear(8, 1)))
    check = check_of(advice, "float16")
    assert check.passed and check.widened == [] and check.runs > 1
    assert advice.loss_scale == check.loss_scale


def test_values_that_differ_too_much_widen_the_list_by_the_worst_layer(as_kept):
    advice = advise(mlp(), max_loss_difference=1e-9, max_rounds=1)
    assert [check.passed for check in advice.checks] == [False, False]
    assert advice.dtype == "float32" and advice.code == ""
    assert advice.float32 == ["0", "1", "2", "3", "4"]
    for check in advice.checks:
        assert check.runs == 2 and len(check.widened) == 1
        worst = max(advice.rows, key=lambda row: row.ratios[check.dtype])
        assert check.widened == [worst.name]
    as_kept(verdicts(advice))


def test_a_layer_without_a_kernel_for_a_dtype_stays(as_kept):
    class NoHalf(nn.Module):
        def forward(self, x):
            if x.dtype == torch.float16:
                raise RuntimeError("not implemented for 'Half'")
            return x * 2

    advice = advise(nn.Sequential(nn.Linear(8, 8), NoHalf(), nn.Linear(8, 1)))
    as_kept(row_of(advice, "1").reasons["float16"])
    assert advice.float16 == ["0", "2"] and advice.bfloat16 == ["0", "1", "2"]


def test_an_error_under_autocast_is_a_failed_check():
    class Picky(nn.Module):
        def forward(self, x):
            if torch.is_autocast_enabled("cpu") and x.dtype != torch.float32:
                raise RuntimeError("only float32")
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8), Picky(), nn.Linear(8, 1))
    advice = advise(model)
    assert all(check.passed and check.widened == ["1"] for check in advice.checks)
    failed = advise(model, max_rounds=0)
    assert failed.checks[0].failure == "RuntimeError: only float32"
    assert failed.checks[0].loss_difference is None


# Kinds of modules.


def test_shared_repeated_and_idle_modules():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5, bias=False)
            self.head.weight = self.embed.weight
            self.twice, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, ids):
            return self.head(self.twice(self.twice(self.embed(ids))))

    model = Odd()
    advice = advise(model, torch.randint(0, 5, (3, 4)))
    assert [row.name for row in advice.rows] == ["embed", "twice", "head"]
    assert [row.calls for row in advice.rows] == [1, 2, 1]
    assert advice.not_seen == ["idle"] and "idle" in str(advice)
    assert "idle" not in advice.float16 + advice.bfloat16 + advice.float32
    gradients = {row_of(advice, n).weight_gradients.abs_max for n in ("embed", "head")}
    assert len(gradients) == 1 and gradients.pop() > 0  # of the one weight
    assert model.head.weight is model.embed.weight


def test_complex_layers_stay():
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(8, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.ifft(torch.fft.fft(x) * self.factor)

    class Model(Assembled):
        def forward(self, x):
            return self.head(self.fourier(x).real)

    advice = advise(Model(fourier=Fourier(), head=nn.Linear(8, 1)))
    assert advice.float32 == ["fourier"]
    assert "complex64" in row_of(advice, "fourier").not_compared


def test_modules_that_keep_their_weights_in_lists_or_use_those_of_others():
    class Model(Assembled):
        def forward(self, x):
            x, _ = self.lstm(x)
            return self.attention(x, x, x)[0]

    torch.manual_seed(0)
    model = Model(
        lstm=nn.LSTM(8, 8, batch_first=True),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
    )
    flat = list(model.lstm._flat_weights)
    advice = advise(model, data(2, 3, 8))
    for name in ("lstm", "attention"):
        assert 0.1 < row_of(advice, name).ratios["bfloat16"] < 4
    assert advice.not_seen == ["attention.out_proj"]
    assert all(a is b for a, b in zip(flat, model.lstm._flat_weights, strict=True))


def test_modules_that_call_others_do_not_stay_for_them(as_kept):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(x) * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.LayerNorm(8), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].inner.weight *= 1e6
    advice = advise(model)
    row = row_of(advice, "0")
    as_kept(row.not_compared)
    assert row.bits["float16"] < 0 and row.runs_in == ["float16", "bfloat16"]
    assert advice.float16 == ["0", "2"]


def test_in_place_layers_are_compared_with_what_they_were_given():
    class Tripled(nn.Module):
        def forward(self, x):
            return x.mul_(3)

    model = nn.Sequential(nn.Linear(8, 8), Tripled(), nn.Linear(8, 1))
    assert 0 < row_of(advise(model), "1").ratios["float16"] < 3


def test_dropout_is_not_taken_for_an_error(as_kept):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    advice = advise(model)
    row = row_of(advice, "1")
    assert row.errors == {}
    as_kept(row.not_compared)
    assert row.outputs.abs_max == pytest.approx(2 * row.inputs.abs_max, rel=0.5)
    assert row.runs_in == ["float16", "bfloat16"]
    assert all(c.passed and c.gradient_difference < 0.05 for c in advice.checks)
    assert advice.notes == []  # nothing was random in the checks


def test_checkpointed_layers_are_called_once():
    class Model(Assembled):
        def forward(self, x):
            return self.c(checkpoint(lambda x: self.b(self.a(x)).tanh(), x, **OPTIONS))

    advice = advise(Model(a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 1)))
    assert [(r.name, r.calls) for r in advice.rows] == [("a", 1), ("b", 1), ("c", 1)]
    assert row_of(advice, "a").weight_gradients.abs_max > 0


def test_a_half_precision_model_stays_as_it_is(as_kept):
    model = mlp()
    with torch.no_grad():
        model[2].weight *= 2e5
    model.half()
    before = [(p.dtype, p.data_ptr(), p.clone()) for p in model.parameters()]
    advice = advise(model, data(6, 8).half(), headroom_bits=3.0)
    for (dtype, pointer, value), p in zip(before, model.parameters(), strict=True):
        assert (p.dtype, p.data_ptr()) == (dtype, pointer) and torch.equal(p, value)
    as_kept(advice.notes[0])
    assert advice.codes["float16"].startswith("model.float(); overflow_fast.keep")


def test_a_model_without_a_loss_is_judged_by_its_outputs():
    advice = advise_precision(mlp(), [data(6, 8)])
    assert advice.loss is None and advice.loss_scale is None
    assert all(c.passed and 0 < c.loss_difference < 0.01 for c in advice.checks)
    assert "no backward" in advice.notes[0]
    assert "outputs differ by" in str(advice)


def test_batches_are_given_as_everywhere():
    model, _ = make()
    x, y = data(4, 8), data(4, 1)
    losses = {
        advise_precision(model, [(x, y)]).loss,
        advise_precision(model, [{"x": x, "y": y}]).loss,
        advise_precision(model, [(x, y)], lambda b: model(*b)["loss"]).loss,
        advise_precision(model, [(x, y)], lambda m, b: m(*b)["loss"]).loss,
    }
    assert len(losses) == 1


# Nothing changes.


class Traces(nn.Module):
    """Leaves traces of each call, and draws random numbers of all kinds."""

    def __init__(self):
        super().__init__()
        self.num_calls, self.seen, self.sum = 0, [], torch.zeros(())
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x):
        self.num_calls += 1
        self.seen.append(x.detach())
        self.sum += x.detach().float().sum()
        self.total += random.random() + numpy.random.rand()
        return x.mul_(1.0)


def everything_of(model, batch):
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "pointers": [t.data_ptr() for t in model.state_dict().values()],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "ids": [id(t) for t in (*model.parameters(), *model.buffers())],
        "grads": [p.grad.clone() for p in model.parameters()],
        "grad ids": [id(p.grad) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks_of(model),
        "traces": [(m.num_calls, len(m.seen), m.sum.clone()) for m in (model[1],)],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": [torch.get_rng_state(), repr(random.getstate())],
        "numpy": repr(numpy.random.get_state()),
        "batch": batch.clone(),
        "mode": [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
    }


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(fails):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Traces(), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
    )
    model[4].eval()
    x = data(6, 8)
    model(x.clone()).sum().backward()
    called = []
    model[0].weight.register_hook(called.append)
    model[0].weight.register_post_accumulate_grad_hook(called.append)

    def loss(batch):
        if fails and torch.is_autocast_enabled("cpu"):
            raise KeyboardInterrupt
        return model(batch).float().sum()

    before = everything_of(model, x)
    if fails:
        with pytest.raises(KeyboardInterrupt):
            advise_precision(model, [x], loss)
    else:
        with torch.no_grad():
            assert advise_precision(model, [x], loss).loss_scale is not None
    assert_same(everything_of(model, x), before)
    assert called == []


def test_gradients_of_other_modules_are_left_alone():
    model, head = mlp(), nn.Linear(1, 1)
    advise_precision(model, [data(6, 8)], lambda x: head(model(x)).float().sum())
    assert all(p.grad is None for p in (*head.parameters(), *model.parameters()))


def test_a_guard_sees_nothing_of_it():
    torch.manual_seed(0)
    model, x = nn.Sequential(Between(), nn.Linear(8, 1)), data(2, 4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer) as guard:
        advice = advise(model, x, max_underflow=1.0)
        assert check_of(advice, "float16").runs == 2  # the first one was not finite
        squares(model, x).backward()
        optimizer.step()
        assert guard.step == 1 and guard.last_report is None


def test_what_is_in_float32_already_is_not_called_fit(as_kept):
    model = mlp()
    with keep_in_fp32(model, ["2"]):
        row = row_of(advise(model), "2")
        as_kept(row.not_compared)
        assert row.runs_in == []


# What cannot be done.


def test_compiled_code_runs_eagerly_under_its_own_names():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    advice = advise_precision(compiled, [data(6, 8)], squares)
    assert advice.bfloat16 == ["0", "1", "2", "3", "4"]
    assert [row.ratios for row in advice.rows] == [r.ratios for r in advise(model).rows]


def test_ddp_must_be_taken_off(as_kept):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(mlp())
        as_kept.error(ValueError, advise_precision, wrapped, [data(6, 8)])
    finally:
        dist.destroy_process_group()


def test_models_that_cannot_be_copied(as_kept):
    def call(model):
        advise_precision(model, [torch.ones(1, 2)])

    as_kept.errors(
        call,
        [nn.Linear(2, 2, device="meta"), nn.LazyLinear(2), torch.jit.script(nn.ReLU())],
    )


def test_wrong_arguments_are_named(as_kept):
    def call(arguments):
        arguments = {"model": mlp(), "batches": [data(6, 8)], **arguments}
        advise_precision(**arguments)

    as_kept.errors(
        call,
        [
            {"model": 1},
            {"batches": torch.ones(2)},
            {"batches": {"x": 1}},
            {"batches": 1},
            {"batches": []},
            {"loss": 1},
            {"loss": lambda m, x: m(x)},
            {"loss": lambda x: None},
            {"max_error": "8"},
            {"max_rounds": -1},
            {"batches": [torch.full((6, 8), torch.inf)]},
        ],
    )


# The text.


def test_the_text_leads_with_the_verdict_and_fits_a_screen(as_kept):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(20)]
    advice = advise(nn.Sequential(*blocks, outlier()))
    text = str(advice)
    lines = text.splitlines()
    assert len(lines) <= 24
    first = next(line for line in lines if "20.2 (Linear)" in line)
    assert lines.index(first) - lines.index(lines[-10]) <= 2  # the worst come first
    as_kept(verdicts(advice), first.partition("(Linear)")[2], lines[-1])


@pytest.mark.parametrize(
    "blocks, shown",
    [
        ([outlier, outlier], "['*.up', '*.norm']"),
        ([outlier, mlp], "['0.up', '0.norm']"),
    ],
)
def test_names_that_differ_in_numbers_become_a_pattern_where_all_are_meant(
    blocks, shown
):
    names = ["in", "act", "up", "norm"]
    layers = [zip(names, block(), strict=False) for block in blocks]
    model = nn.Sequential(*(nn.Sequential(OrderedDict(each)) for each in layers))
    code = advise(model).codes["float16"]
    assert code == f"overflow_fast.keep_in_fp32(model, {shown})"


def test_names_that_are_numbers_alone_become_no_pattern(as_kept):
    model = nn.Sequential(outlier(), outlier(), nn.Linear(1, 1))
    model[0][4] = nn.Linear(8, 8)
    as_kept(advise(model).codes["float16"])


def test_the_example_of_the_docstring():
    example = doctest.DocTestFinder().find(advise_precision)
    example[0].globs = {"torch": torch, "advise_precision": advise_precision}
    assert doctest.DocTestRunner().run(example[0]) == (0, 3)


@pytest.mark.parametrize("kind", FEW)
def test_advice_on_precision_judges_the_output(kind):
    class Large(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.container = CONTAINERS[kind]
            nn.init.constant_(self.lin.weight, 300.0)

        def forward(self, x):
            return self.container.make(self.lin(x))

    x = torch.full((2, 4), 300.0)  # 360000: inf in float16
    torch.manual_seed(0)
    expected = str(advise_precision(Large("tuple"), [x]))
    torch.manual_seed(0)
    assert str(advise_precision(Large(kind), [x])) == expected
