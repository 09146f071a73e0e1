"""Modules that are compiled are recorded at their boundary, however they are."""

import pytest
import torch

import overflow_fast
from overflow_fast.torch_internals.compiled_calls import own_compiled_call

HOW = ["compile()", "torch.compile"]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x, scale=1.0):
        if x.sum() > 1e6:
            raise ValueError("too large")
        return x + torch.tanh(self.layer(x)) * scale


def wrong(graph, inputs):
    """A compiler with a bug."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.tanh:
            node.target = torch.sigmoid
    graph.recompile()
    return graph


def model_of(how, backend, at=2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    if how == "torch.compile":
        model[at] = torch.compile(model[at], backend=backend)
    elif how:
        model[at].compile(backend=backend)
    return model


def given(scale=1.0):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1)) * scale


@pytest.fixture
def compared(tmp_path):
    def compare(model, reference, x=None):
        for name, each in (("a", model), ("b", reference)):
            torch._dynamo.reset()
            with overflow_fast.recording(tmp_path / name, each):
                each(given() if x is None else x).sum().backward()
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_block_is_named_and_its_inside_is_said_to_be_unseen(
    compared, how, as_kept
):
    diff = compared(model_of(how, wrong), model_of(how, "eager"))
    assert (diff.first.module, diff.first.class_name) == ("2", "Block"), diff
    assert str(diff.first.row.place) == "2: output"
    as_kept(diff.said, diff.verdict())


@pytest.mark.parametrize("how", HOW)
def test_a_compiled_block_and_one_that_is_not(compared, how, as_kept):
    diff = compared(model_of(how, "eager"), model_of("", ""))
    assert diff.first is None, diff
    rows = {str(row.place): row for row in diff.rows}
    assert rows["2: output"].verdict == rows["2: input[0]"].verdict == "equal"
    assert rows["2: output gradient"].verdict == "equal"
    as_kept(diff.said, diff.verdict())


def test_a_whole_model_that_is_compiled_in_place(compared, as_kept):
    model = model_of("", "")
    model.compile(backend="eager")
    diff = compared(model, model_of("", ""))
    rows = {str(row.place): row for row in diff.rows}
    assert rows["the model: output"].verdict == "equal"
    as_kept(diff.said, diff.verdict())


def test_the_call_is_the_programs_own_again(tmp_path):
    model = model_of("compile()", "eager")
    call = own_compiled_call(model[2])
    with overflow_fast.recording(tmp_path / "a", model):
        assert own_compiled_call(model[2]) is not call
    assert own_compiled_call(model[2]) is call
    with overflow_fast.recording(tmp_path / "b", model):
        model[2].compile(backend="eager")
        call = own_compiled_call(model[2])
    assert own_compiled_call(model[2]) is call


def test_an_error_of_compiled_code_is_the_programs(tmp_path):
    model = model_of("compile()", "eager", at=0)
    with overflow_fast.recording(tmp_path / "a", model):
        with pytest.raises(ValueError, match="too large"):
            model(given(1e9).abs())
        model(given())
    diff = overflow_fast.compare(tmp_path / "a", tmp_path / "a")
    names = [str(row.place) for row in diff.rows]
    assert {"0: input[0]", "0 #1: output", "the model #1: output"} <= {*names}
