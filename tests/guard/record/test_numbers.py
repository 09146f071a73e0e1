"""The numbers of a record: in its tensors, in its rows, and of one magnitude."""

import math

import pytest
import torch
from flight_records import head_lines, packed, step_line

from overflow_fast import read_record
from overflow_fast.base.text import bits_left
from overflow_fast.guard.files.json_text import line_bytes
from overflow_fast.guard.files.schema import convert
from overflow_fast.guard.record.record_lines import COLUMNS, Columns

NAN, INF = math.nan, math.inf
LIMIT = 65504.0


@pytest.fixture
def record(tmp_path):
    """Steps with wide and narrow numbers, of one model and of two."""
    wide = {
        "num": 2,
        "abs_min": packed("d", [0.0, NAN]),
        "num_inf": packed("q", [0, 1]),
    }
    wide |= {"num_inf": packed("q", [0, 1])}
    wide |= {"abs_max": packed("d", [1e-320, INF]), "num_nan": packed("q", [-1, 0])}
    lines = [
        step_line(0, high=[0.0, 6e-8, LIMIT, NAN]),
        step_line(1, high=[INF, NAN, 3e38, 1.0], num_nan=packed("q", [0, 3, 0, 0])),
        step_line(2, num_zero=packed("q", [7, 0, -1, 2])),
    ]
    lines[2].models.append(convert(wide, Columns))
    path = tmp_path / "run.ofr"
    path.write_bytes(head_lines() + b"".join(map(line_bytes, lines)))
    return read_record(path)


def test_rows_are_those_of_the_tensors(record):
    assert len(record) == 3 and len(record.entries) == 6
    absent = [name for name in COLUMNS if record.values[name] is None]
    assert absent == ["num_saturated"]
    rows = [row for row in record if row["step"] == 2]
    high, zeros = (record.values[name][2].tolist() for name in ("abs_max", "num_zero"))
    assert [row["abs_max"] for row in rows] == high == [*[2.0] * 4, 1e-320, INF]
    assert zeros == [7, 0, -1, 2, -1, -1]
    assert [row["num_zero"] for row in rows] == [7, 0, None, 2, None, None]
    assert all(row["num_saturated"] is None for row in rows)


VALUES = (0.0, 1e-300, 6e-8, 1.0, LIMIT, 1e300, INF, NAN, -1.0)


@pytest.mark.parametrize("limit", [LIMIT, 3.4e38, 1.8e308, 0.0, -1.0, INF, NAN])
def test_bits_of_one_magnitude_are_those_of_a_tensor(limit):
    found = [bits_left(limit, value) for value in VALUES]
    expected = torch.log2(limit / torch.tensor(VALUES, dtype=torch.float64))
    found = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-15, atol=0, equal_nan=True)
