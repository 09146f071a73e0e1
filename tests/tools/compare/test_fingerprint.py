"""Fingerprints estimate differences, and add up over shards."""

import pytest
import torch

from overflow_fast.guard.files.json_text import dumps
from overflow_fast.guard.files.schema import Lines
from overflow_fast.tools.compare.recording_schema import KINDS, RowLine
from overflow_fast.tools.compare.shards import Shard, pieces
from overflow_fast.tools.compare.summary import distance, factor_of, fetch, summarize


def fingerprint(x):
    """The signed sums as a recording keeps them."""
    return fetch([summarize(x)])[0].sums


def outliers(seed=0):
    x = torch.randn(256, 768, generator=torch.Generator().manual_seed(seed))
    x[:, 42] *= 60
    x[:, 300] *= 30
    return x


def one_channel(x):
    y = x.clone()
    y[:, 42] *= 1.1
    return y


DIFFERENCES = {
    "rounding": lambda x: x.bfloat16().float(),
    "noise": lambda x: x + 1e-3 * torch.randn_like(x),
    "channel": one_channel,
    "rows": lambda x: x[torch.randperm(len(x))],
    "shift": lambda x: x + 0.01,
    "scale": lambda x: x * 1.001,
}


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES)
@pytest.mark.parametrize("shape", [(256, 768), (64, 3072), (196608,)])
def test_it_estimates_a_difference(change, shape):
    x = outliers().view(shape)
    y = change(x.view(256, 768)).reshape(shape)
    estimate = (fingerprint(x) - fingerprint(y)).norm() / (x - y).norm()
    assert 0.7 < estimate < 1.3


def test_one_element_is_not_lost():
    x = outliers()
    y = x.clone()
    y[100, 100] += 1
    assert (fingerprint(x) - fingerprint(y)).norm().item() == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_is_of_the_values_and_not_of_the_dtype(dtype):
    x = outliers().to(dtype)
    assert torch.equal(fingerprint(x).float(), fingerprint(x.double()).float()) or (
        (fingerprint(x) - fingerprint(x.double())).norm() < 1e-6 * x.double().norm()
    )


def whole_of(values, parts):
    return torch.stack(
        [
            fetch([summarize(values[where].contiguous(), p)])[0].sums
            for where, p in parts
        ]
    ).sum(0)


@pytest.mark.parametrize("rows", [1000, 37])
def test_shards_add_up(rows):
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(3))
    expected = fingerprint(x.double())
    shape = tuple(x.shape)
    half = rows // 2
    cuts = {
        "rows": [
            (slice(0, half), Shard(shape, (0, 0))),
            (slice(half, None), Shard(shape, (half, 0))),
        ],
        "columns": [
            ((slice(None), slice(c, c + 32)), Shard(shape, (0, c))) for c in (0, 32, 64)
        ],
        "both": [
            ((slice(r, r + half + 1), slice(c, c + 48)), Shard(shape, (r, c)))
            for r in (0, half + 1)
            for c in (0, 48)
        ],
    }
    for name, parts in cuts.items():
        apart = (whole_of(x, parts) - expected).norm()
        assert apart < 1e-6 * x.norm(), name


def test_partial_sums_add_up():
    x = torch.randn(50, 60)
    part = Shard((50, 60), (0, 0), (0,))
    found = sum(fetch([summarize(x * f, part)])[0].sums for f in (0.3, 0.7))
    assert (found - fingerprint(x.double())).norm() < 1e-6 * x.norm()


def test_a_part_lies_where_it_was():
    x = torch.randn(40000)
    found = list(pieces(x, Shard((100000,), (17,))))
    assert found[0][1] == 17
    assert torch.equal(torch.cat([chunk for chunk, _ in found]), x)


def test_low_and_high_of_a_column_are_its_own():
    x = torch.rand(8, 8) + 1
    found = fetch([summarize(x[:, :4].contiguous(), Shard((8, 8), (0, 0)))])[0]
    assert found.low == x[:, :4].min().item() > 1


def test_the_lowest_numbers_do_not_break_it():
    lowest = torch.full((1000,), torch.finfo(torch.float32).min)
    found = fetch([summarize(lowest)])[0]
    assert found.num_inf == 0 and found.low == lowest[0].item()
    place = {"phase": "forward", "module": "", "role": "output", "dtype": "float32"}
    row = RowLine(order=0, **place, shape=(1000,))
    row.take(found)
    line = Lines(*KINDS).decode(dumps(row).encode())
    assert torch.equal(line.sums, found.sums) and line.sums.isfinite().all()


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.1, 0.01, 1e-4, 1024.0])
def test_a_multiple_has_its_factor(factor):
    found = fetch([summarize(outliers() * factor), summarize(outliers())])
    assert factor_of(*found) == (pytest.approx(factor), pytest.approx(0, abs=1e-6))
    assert distance(*found) == pytest.approx(abs(factor - 1), rel=0.3)


def test_zeros_have_a_distance_and_no_factor():
    zeros, ones = fetch([summarize(torch.zeros(10)), summarize(torch.ones(10))])
    assert distance(zeros, ones) == 1 and distance(ones, zeros) == float("inf")
    assert distance(zeros, zeros) == 0
    assert factor_of(ones, zeros)[1] > 1
    assert factor_of(zeros, zeros) == (1, 0)
