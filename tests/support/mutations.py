"""Damages files: cuts, flips bytes, moves lines, and puts any value in a JSON."""

import copy
import json
import os

HUGE = 10**12
VALUES = (
    *(None, True, -1, 0, 1, 0.5, HUGE, 2**31, 2**63, -(2**63), 10**30, 1e300),
    *(float("nan"), float("inf"), "", "x", "inf", "-1", "\x1b[2J\n[overflow_fast] x"),
    *("/dev/zero", "../../x", "\0", "\ud800", "AAAA", "a" * 5000, [], {}, [1], [[]]),
    *({"a": 1}, [None] * 50, {"tensor": "x"}, {"list": [{"value": 1}]}),
)
DEEP = b"[" * 100_000, b'{"a":' * 100_000, b'{"list":[' * 50_000


def _places(value, path=()):
    yield path
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = list(enumerate(value))[:40]
    for key, each in items:
        yield from _places(each, (*path, key))


def mutated_json(chance, value):
    """The bytes of a JSON value with one or two changes."""
    value = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 2))):
        path = chance.choice(list(_places(value)))
        if not path:
            continue
        at = value
        for key in path[:-1]:
            at = at[key]
        change = chance.random()
        if change < 0.2:
            del at[path[-1]]
        elif change < 0.3 and isinstance(at, list):
            at.append(at[path[-1]])
        else:
            at[path[-1]] = copy.deepcopy(chance.choice(VALUES))
    data = json.dumps(value).encode()
    if chance.random() < 0.03:
        return data.replace(b":", b":" + chance.choice(DEEP), 1)
    return data


def mutated_bytes(chance, data):
    """Bytes that were cut, flipped, filled, moved or doubled."""
    data = bytearray(data)
    begin = chance.randrange(len(data) + 1)
    end = min(len(data), begin + chance.choice((1, 8, 500)))
    kind = chance.randrange(6)
    if kind == 0:
        del data[begin:]
    elif kind == 1:
        del data[begin:end]
    elif kind == 2:
        for i in range(begin, end):
            data[i] ^= 1 << chance.randrange(8)
    elif kind == 3:
        data[begin:end] = bytes(end - begin)
    elif kind == 4:
        data[begin:begin] = chance.choice(
            (b"\n", b"\xff\xfe", b"{}", b"1" * 400, *DEEP)
        )
    else:
        data[begin:begin] = data[begin:end]
    return bytes(data)


def mutated_lines(chance, data):
    """JSON lines of which one is missing, doubled, moved or changed."""
    lines = data.splitlines(keepends=True)
    at = chance.randrange(len(lines))
    kind = chance.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(chance.randrange(len(lines)), lines[at])
    elif kind == 2:
        lines.insert(0, lines.pop(at))
    else:
        lines[at] = mutated_json(chance, json.loads(lines[at])) + b"\n"
    return b"".join(lines)


def spoil(chance, path):
    """Damages one file as its name asks for."""
    data = path.read_bytes()
    if path.suffix in (".jsonl", ".ofr") and chance.random() < 0.7:
        new = mutated_lines(chance, data)
    elif path.suffix == ".json" and chance.random() < 0.7:
        new = mutated_json(chance, json.loads(data))
    elif chance.random() < 0.02:
        path.unlink()
        chance.choice((os.mkfifo, os.mkdir))(path)
        return
    else:
        new = mutated_bytes(chance, data)
    path.write_bytes(new)
