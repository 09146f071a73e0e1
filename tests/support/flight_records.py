"""Lines of flight records as a guard writes them, made without one."""

import array
import base64
import sys

from overflow_fast.guard.files.json_text import line_bytes
from overflow_fast.guard.files.schema import Lines
from overflow_fast.guard.record.record_lines import KIND, KINDS, RECORD_SCHEMA

NUM_ENTRIES = 4
LINES = Lines(*KINDS)


def head_lines(**run):
    first = {"kind": KIND, "schema": RECORD_SCHEMA, "byteorder": sys.byteorder, **run}
    entry = {"module": "h.0", "class": "Block", "kind": "output", "numel": 6}
    entries = [
        {**entry, "label": f"output[{i}]", "dtype": "float16", "limit": 65504.0}
        for i in range(NUM_ENTRIES)
    ]
    return line_bytes(first) + line_bytes(
        {"kind": "entries", "model": 0, "first": 0, "entries": entries}
    )


def packed(code, values):
    return base64.b64encode(array.array(code, values).tobytes()).decode()


def step_line(number, low=None, high=None, **columns):
    """The line of a step whose entries have its number as magnitude."""
    values = [float(number)] * NUM_ENTRIES
    model = {
        "num": NUM_ENTRIES,
        "abs_min": packed("f", low or values),
        "abs_max": packed("f", high or values),
        "num_nan": "",
        "num_inf": "",
        **columns,
    }
    step = {"first": number, "last": number, "count": 1, "level": 0, "time": 1e9}
    cost = {"seconds": 0.5, "guard_seconds": 0.125, "learning_rate": 1e-3}
    done = {"actions": {}, "skipped": 0, "models": [model]}
    return LINES.decode(line_bytes({"kind": "steps", **step, **cost, **done}))


def append_step(file, number):
    heads = head_lines() if number == 0 else b""
    file.append(heads, line_bytes(step_line(number)))
