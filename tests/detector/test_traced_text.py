"""The constant of a compiled frame: read once, and the same in every process."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import python
from torch import nn
from torch._dynamo.utils import counters

from overflow_fast import _C, DebugUnderflowOverflow
from overflow_fast.detector.traced_walk import (
    ATTRIBUTE,
    FORWARD,
    INDEX,
    INPUT,
    KEY,
    NONE,
    NOT_SCANNED,
    OUTPUT,
    header_text,
    id_of,
    item_text,
    tensor_text,
)

pytestmark = pytest.mark.xdist_group("compiled")

X = torch.ones(2)
HEADER = header_text((FORWARD, "Linear", False, True, False))


@pytest.fixture
def detector():
    with DebugUnderflowOverflow(nn.Linear(2, 2), list_kwargs=True) as detector:
        yield detector


def run_frame(detector, id, text, tensors=()):
    """Runs the operator as compiled code does; returns the frame's entries."""
    handle = detector.root_hook.handle_tensor
    torch.ops.overflow_fast.frame(handle, id, text, list(tensors))
    recorder = detector.recorder
    return recorder.entries(recorder.history()[-1])


def test_a_text_is_read_where_its_number_is_unknown(detector):
    text = f"{HEADER} {tensor_text(((INPUT, ''),), 3, True, True, False)}"
    first = run_frame(detector, 1, text, [X])
    again = run_frame(detector, 1, "not read", [X])
    assert [e.label for e in again] == [e.label for e in first]
    assert len(first) == 1
    with pytest.raises(ValueError, match="cannot read"):
        run_frame(detector, 2, "not read", [X])


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "F",
            "f:Linear",
            "Ff:Linear ",
            "Ff:Linear  n:i",
            "Ff:Linear n:i ",
            "Ff:a#b",
        ),
        *("Ff:a q:i", "Ff:a n", "Ff:a n:", "Ff:a n:u", "Ff:a n:i#", "Ff:a n:i#-1"),
        *(
            "Ff:a n:i#1x",
            "Ff:a k:i",
            "Ff:a kx:i",
            "Ff:a t-1:i",
            "Ff:a w:i",
            "Ff:a n:i:b",
        ),
        *("Ff:%", "Ff:%4", "Ff:%zz", "Ff:%ff", "Ff:a n:i@%e2%82", "Ff:a n:o*x"),
        f"Ff:a n:i#{2**64}",
    ],
)
def test_anything_else_is_refused(detector, text):
    with pytest.raises(ValueError):
        run_frame(detector, id_of(text), text)


KEYS = st.one_of(st.text(st.characters(exclude_categories=())), st.integers())


@pytest.mark.slow
@given(name=st.text(), why=st.text(), key=KEYS, attribute=st.text())
def test_any_key_is_read_as_it_was_written(name, why, key, attribute):
    path = ((OUTPUT, ""), (INDEX, 7), (KEY, key), (ATTRIBUTE, attribute))
    items = item_text(path, NONE), item_text(path, NOT_SCANNED, why)
    text = " ".join([header_text((FORWARD, name, False, True, False)), *items])
    assert not set(text) & set("\"'\\\n")
    with DebugUnderflowOverflow(nn.Linear(2, 2)) as detector:
        none, not_scanned = run_frame(detector, id_of(text), text)
        assert detector.recorder.history()[-1].class_name == name
    parts = [part.value for part in none.label.parts]
    assert parts == [7, key, attribute]
    assert (none.kind, not_scanned.reason) == (_C.EntryKind.NONE, why)


def test_a_tensor_that_is_passed_again_is_not_scanned_again(detector):
    paths = ((OUTPUT, ""),), ((INPUT, ""),)
    first = tensor_text(paths[0], 3, True, True, False)
    again = tensor_text(paths[1], 3, False, True, False)
    known = run_frame(detector, 1, f"{HEADER} {first}", [X])
    scanned = detector.recorder.coverage.bytes_scanned
    found = run_frame(detector, 2, f"{HEADER} {again}", [X + 1])
    assert [e.stat.abs_max for e in [*found, *known]] == [1, 1]
    assert [str(e.label) for e in found] != [str(e.label) for e in known]
    assert detector.recorder.coverage.bytes_scanned == scanned
    unknown = tensor_text(paths[1], 4, False, True, False)
    found = run_frame(detector, 3, f"{HEADER} {unknown}", [X + 1])
    assert [e.stat.abs_max for e in found] == [2]


def test_a_number_is_that_of_its_text():
    assert id_of("a") == id_of("a") != id_of("b")
    assert all(0 <= id_of(str(i)) < 2**63 for i in range(99))


CACHEABLE = [
    "torch.ops.higher_order.with_effects",
    "overflow_fast.detector.compiled.emit",
]
CALL = "overflow_fast.detector.compiled.emit_call"


def compiled_frames(folder):
    """The frames of a compiled model, and how AOTAutograd's cache in a folder fared."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    cacheable = dict.fromkeys([*CACHEABLE, CALL], "1")
    config = torch._inductor.config.patch(unsafe_marked_cacheable_functions=cacheable)
    with config, torch.no_grad():
        with DebugUnderflowOverflow(model) as detector:
            for _ in range(2):
                torch.compile(model)(torch.ones(1, 2))
    found = {
        key: counters["aot_autograd"][f"autograd_cache_{key}"]
        for key in ("hit", "miss")
    }
    return list(detector.frames), found


@pytest.mark.slow
def test_code_out_of_a_cache_in_another_process(tmp_path):
    script = "import json, test_traced_text as t, sys; "
    script += "print(json.dumps(t.compiled_frames(sys.argv[1])))"
    found = []
    for _ in range(2):
        done = python("-c", script, str(tmp_path), cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (traced, first), (cached, second) = found
    assert (first["miss"], second) == (1, {"hit": 1, "miss": 0})
    assert len(traced) == 6 and cached == traced
