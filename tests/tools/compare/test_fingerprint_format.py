"""The fingerprint to the last bit: a reference in NumPy, vectors, modes of torch."""

import contextlib

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import overflow_fast
from overflow_fast.tools.compare.summary import fetch, summarize

WIDTH, PATTERNS, PERIODS = 251, 64, 16
PERIOD = WIDTH * PATTERNS


def fingerprint(x):
    """The signed sums as a recording keeps them."""
    return fetch([summarize(x)])[0].sums


def signs(numbers, seed):
    bits = (numbers + seed * 0x9E3779B9) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return numpy.where((bits ^ (bits >> 16)) & 1, 1, -1)


def halved(rows, half):
    while half:
        if len(rows) > half:
            added = rows[: len(rows) - half] + rows[half:]
            rows = numpy.concatenate([added, rows[len(rows) - half : half]])
        half //= 2
    return rows[0]


def reference(values):
    """The fingerprint as docs/formats.md specifies it."""
    wide = numpy.float32 if values.dtype.kind == "f" else numpy.float64
    wide = numpy.float64 if values.dtype == numpy.float64 else wide
    flat = numpy.where(numpy.isfinite(values), values, 0).astype(wide).reshape(-1)
    flat = numpy.pad(flat, (0, -len(flat) % PERIOD)).reshape(-1, PATTERNS, WIDTH)
    total = numpy.zeros((PATTERNS, WIDTH), wide)
    for begin in range(0, len(flat), PERIODS):
        rows = flat[begin : begin + PERIODS]
        numbers = numpy.arange(begin * PATTERNS, (begin + len(rows)) * PATTERNS)
        rows = rows * signs(numbers, 1).reshape(-1, PATTERNS, 1).astype(wide)
        total += halved(rows, PERIODS // 2)
    columns = signs(numpy.arange(PERIOD), 2).reshape(PATTERNS, WIDTH).astype(wide)
    return halved(total * columns, PATTERNS // 2)


LENGTHS = [0, 1, 250, 251, 252, PERIOD, PERIOD + 1, 3 * PERIOD, 9 * PERIOD - 5]
LENGTHS += [16 * PERIOD, 17 * PERIOD + 77, 40 * PERIOD]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_it_is_that_of_the_reference_in_numpy_to_the_last_bit(length, dtype):
    generator = torch.Generator().manual_seed(length)
    x = (torch.randn(length, generator=generator) * 1e3).to(dtype)
    found, expected = fingerprint(x).numpy(), reference(x.numpy())
    assert (found == expected).all()
    assert str(summarize(x).dtype) == f"torch.{expected.dtype}"


def test_integers_and_values_that_are_not_finite():
    whole = torch.arange(-5000, 20000)
    assert (fingerprint(whole).numpy() == reference(whole.numpy())).all()
    x = torch.randn(20000)
    x[7], x[100], x[19999] = torch.nan, torch.inf, -torch.inf
    found = fetch([summarize(x)])[0]
    assert (found.sums.numpy() == reference(x.numpy())).all()
    found = fetch([summarize(torch.full((20000,), 3e38))])[0]
    wide = torch.full((20000,), 3e38).double().numpy()
    assert (found.sums.numpy() == reference(wide)).all()


# The vectors of docs/formats.md: computed with the reference alone.
def test_the_vectors_of_the_documentation():
    one = fingerprint(torch.arange(1.0, 6.0)).tolist()
    assert one[:5] == VECTORS["1 to 5"] and not any(one[5:])
    many = fingerprint(torch.arange(20000.0)).tolist()
    assert [many[0], many[1], many[250]] == VECTORS["0 to 19999"]
    large = fingerprint(torch.arange(300000.0) / 7).tolist()
    assert [large[0], large[1], large[250]] == VECTORS["0/7 to 299999/7"]


VECTORS = {
    "1 to 5": [-1.0, 2.0, -3.0, 4.0, 5.0],
    "0 to 19999": [-155118.0, -63760.0, 59733.0],
    "0/7 to 299999/7": [204600.9375, -1136032.625, -1489858.375],
}


class Wrong(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_float = isinstance(out, torch.Tensor) and out.is_floating_point()
        return out + 1 if is_float else out


class WrongOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_float = isinstance(out, torch.Tensor) and out.is_floating_point()
        return out.add(1) if is_float else out


@contextlib.contextmanager
def setting(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def deterministic():
    return setting(torch.use_deterministic_algorithms, True, False)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
    "deterministic": deterministic,
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "gradients": torch.enable_grad,
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "default float64": lambda: setting(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "default float16": lambda: setting(
        torch.set_default_dtype, torch.float16, torch.float32
    ),
    "default device": lambda: torch.device("meta"),
    "flush": lambda: setting(torch.set_flush_denormal, True, False),
    "matmul precision": lambda: setting(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "threads": lambda: setting(torch.set_num_threads, 2, 1),
    "functions": Wrong,
    "operators": WrongOperator,
    "saving": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda t: t * 2, lambda t: t
    ),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_no_mode_of_the_users_changes_it(mode):
    from overflow_fast.tools.compare import signed_sums as module

    x = torch.randn(20 * PERIOD, generator=torch.Generator().manual_seed(0))
    x[:5000] = 1e-39
    kinds = [x, x.half(), x.double(), x.to(torch.float8_e4m3fn), (x * 100).int()]
    before = [fetch([summarize(each)])[0] for each in kinds]
    assert all(each.sums.any() for each in before)
    module._row_signs.cache_clear()
    module._pattern_signs.cache_clear()
    with mode():
        found = [fetch([summarize(each)])[0] for each in kinds]
        alone = fingerprint(x)
    again = [fetch([summarize(each)])[0] for each in kinds]  # by what was kept of signs
    assert torch.equal(alone, before[0].sums)
    for mine, its in zip([*found, *again], [*before, *before], strict=True):
        assert torch.equal(mine.sums, its.sums)
        assert (mine.low, mine.high) == (its.low, its.high)
        assert mine.squares == pytest.approx(its.squares, rel=1e-6)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_inputs_recorded_in_a_mode_are_equal_to_those_without(mode, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    x = torch.randn(16, 64)
    for name, around in (("a", mode), ("b", contextlib.nullcontext)):
        with overflow_fast.recording(tmp_path / name, model), around():
            model(x)
    diff = overflow_fast.compare(tmp_path / "a", tmp_path / "b")
    row = next(r for r in diff.rows if str(r.place) == "the model: input[0]")
    assert row.verdict == "equal", diff
