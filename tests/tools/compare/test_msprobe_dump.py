"""Dumps of msprobe as a side of a comparison: its format, written by hand."""

import json

import pytest
import torch
from compared_models import batch, tower

import overflow_fast


class Dumper:
    """Writes what msprobe writes at level L0, with the task tensor."""

    def __init__(self, folder, model, tensors=True):
        self.data, self.folder, self.tensors = {}, folder / "step0" / "rank", tensors
        (self.folder / "dump_tensor_data").mkdir(parents=True)
        for name, module in model.named_modules():
            if name:
                full = f"Module.{name}.{type(module).__name__}"
                module.register_forward_hook(
                    lambda m, a, k, out, n=full: self.forward(n, m, a, k, out),
                    with_kwargs=True,
                )
                module.register_full_backward_hook(
                    lambda m, gi, go, n=full: self.backward(n, go)
                )

    def info(self, tensor, name):
        facts = {"type": "torch.Tensor", "dtype": str(tensor.dtype)}
        facts |= {"shape": list(tensor.shape), "Max": tensor.max().item()}
        if self.tensors:
            facts["data_name"] = f"{name}.pt"
            torch.save(tensor.detach(), self.folder / "dump_tensor_data" / f"{name}.pt")
        return facts

    def forward(self, name, module, args, kwargs, output):
        name = f"{name}.forward.0"
        self.data[name] = {
            "input_args": [
                self.info(each, f"{name}.input.{i}") for i, each in enumerate(args)
            ],
            "input_kwargs": {key: {"type": "float"} for key in kwargs},
            "output": [self.info(output, f"{name}.output.0")],
            "parameters": {
                key: self.info(each, f"{name}.parameters.{key}")
                for key, each in module.named_parameters(recurse=False)
            },
        }

    def backward(self, name, gradients):
        name = f"{name}.backward.0"
        infos = [self.info(each, f"{name}.input.0") for each in gradients]
        self.data[name] = {"input": infos, "output": []}

    def close(self):
        whole = {"task": "tensor", "level": "L0", "data": self.data}
        (self.folder / "dump.json").write_text(json.dumps(whole))


def dump(folder, model, **options):
    dumper = Dumper(folder, model, **options)
    model(batch()).backward()
    dumper.close()
    return folder


def broken():
    model = tower()
    model.blocks[1].norm.eps = 0.1
    return model


@pytest.fixture
def recorded(tmp_path):
    model = tower()
    with overflow_fast.recording(tmp_path / "ours", model, tensors=True):
        model(batch()).backward()
    return tmp_path / "ours"


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("is_reference", [True, False])
def test_a_dump_is_compared_with_a_recording(tmp_path, recorded, is_reference):
    pair = [dump(tmp_path / "its", tower()), recorded]
    diff = overflow_fast.compare(*(pair[::-1] if is_reference else pair))
    assert diff.first is None, diff
    counts = diff.counts()
    assert counts["equal"] == len(diff.rows) > 60
    assert {row.place.role for row in diff.rows} == {
        *("parameter", "input", "output", "output_gradient")
    }


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_wrong_layer_of_a_dump_is_named(tmp_path, recorded):
    its = dump(tmp_path / "its", broken())
    for pair in ((its, recorded), (recorded, its)):
        assert overflow_fast.compare(*pair).first.module == "blocks.1.norm"


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_two_dumps(tmp_path):
    pair = dump(tmp_path / "a", broken()), dump(tmp_path / "b", tower())
    diff = overflow_fast.compare(*pair)
    assert diff.first.module == "blocks.1.norm"
    assert diff.first.row.measures.is_exact


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_statistics_alone_are_said_to_be_too_little(tmp_path, recorded):
    its = dump(tmp_path / "its", tower(), tensors=False)
    diff = overflow_fast.compare(its, recorded)
    assert diff.num_compared == 0
    assert "dump with task=tensor" in "\n".join(diff.said)
