"""A checkpoint on disk, or a state dict: finite, or which tensors are not."""

import argparse
import json
import pickle

import pytest
import torch
from guarding import INF, NAN, batches, make, train
from torch.distributed import checkpoint

from overflow_fast import NonFiniteError, assert_finite_state
from overflow_fast.guard.saved_state import check_saved
from overflow_fast.guard.verdict.rules import Rules

safetensors = pytest.importorskip("safetensors.torch")


def state():
    return {"h.w": torch.ones(2, 2), "h.b": torch.tensor([1.0, NAN, INF])}


def nested():
    return {"model": state(), "step": 3, "moments": [{"m": torch.tensor([-INF])}]}


def save_distributed(tensors, path):
    checkpoint.save(tensors, checkpoint_id=path, no_dist=True)


def save_old(tensors, path):
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


FORMS = {
    "safetensors": (safetensors.save_file, state, ["h.b"]),
    "torch": (torch.save, nested, ["model.h.b", "moments.0.m"]),
    "old torch": (save_old, nested, ["model.h.b", "moments.0.m"]),
    "distributed": (save_distributed, lambda: {"a": state()}, ["a.h.b"]),
}


def checked(source, allow=None):
    return check_saved(source, Rules(allow or {}))


@pytest.mark.day
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_named(form, tmp_path):
    save, made, names = FORMS[form]
    save(made(), tmp_path / "saved")
    found = checked(tmp_path / "saved")
    assert [each.label for each in found.bad] == names
    assert (found.bad[0].num_nan, found.bad[0].num_inf) == (1, 1)
    assert (found.is_finite, found.not_checked) == (False, [])
    with pytest.raises(NonFiniteError, match=rf"`{names[0]}` holds 1 nan and 1 inf"):
        assert_finite_state(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_finite_passes(form, tmp_path):
    FORMS[form][0]({"w": torch.ones(3)}, tmp_path / "saved")
    assert_finite_state(str(tmp_path / "saved"))
    found = checked(tmp_path / "saved")
    assert (found.is_finite, found.num_tensors, found.num_bytes) == (True, 1, 12)


def test_a_state_dict_is_looked_at(as_kept):
    model, optimizer = make()
    train(model, optimizer, batches(1))
    assert_finite_state(model.state_dict())
    assert_finite_state(optimizer.state_dict())
    optimizer.state[model.head.bias]["exp_avg"][0] = NAN
    as_kept.error(NonFiniteError, assert_finite_state, optimizer.state_dict())
    as_kept.error(TypeError, assert_finite_state, model.state_dict(), optimizer)


def test_what_a_rule_allows_of_weights_or_buffers_is_fine(as_kept):
    saved = {"h.mask": torch.tensor([0.0, -INF])}
    as_kept.error(NonFiniteError, assert_finite_state, saved)
    for place in ("*:buffer*", "h:weight.mask"):
        assert_finite_state(saved, allow={place: "-inf"})
    with pytest.raises(NonFiniteError):
        assert_finite_state(saved, allow={"g:buffer*": "-inf"})


def test_a_folder_of_shards_is_looked_at_as_a_whole(tmp_path, as_kept):
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    (tmp_path / "deeper").mkdir()
    torch.save(nested(), tmp_path / "deeper/optimizer.pt")
    (tmp_path / "README.md").write_text("no checkpoint")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    found = checked(tmp_path)
    as_kept(str(found).replace(str(tmp_path), "PATH"))
    (tmp_path / "deeper/optimizer.pt").unlink()
    with pytest.raises(ValueError, match=r"not all was checked: model-2\.safetensors"):
        assert_finite_state(tmp_path)


class Runs:
    """Runs code where it is unpickled without care."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_in_a_file_is_executed(tmp_path):
    made = tmp_path / "made"
    config = argparse.Namespace(rate=0.1, start=torch.tensor([NAN]))
    torch.save({"x": Runs(made), "args": config}, tmp_path / "saved.pt")
    found = checked(tmp_path / "saved.pt")
    assert [each.label for each in found.bad] == ["args.given.0.start"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/.metadata").write_bytes(pickle.dumps(Runs(made)))
    (why,) = checked(tmp_path / "folder").not_checked
    assert "must hold data of torch.distributed.checkpoint alone" in why
    assert not made.exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"\x08" + b"\0" * 7 + b"{"])
def test_what_cannot_be_read_is_not_called_finite(content, tmp_path):
    (tmp_path / "x.pt").write_bytes(content)
    found = checked(tmp_path / "x.pt")
    assert found.is_finite is None and len(found.not_checked) == 1
    with pytest.raises(ValueError, match="nothing could be checked"):
        assert_finite_state(tmp_path)


def test_what_holds_no_tensor_is_not_called_finite(tmp_path, as_kept):
    torch.save({"step": 3}, tmp_path / "x.pt")
    assert checked(tmp_path / "x.pt").not_checked == ["it holds no tensor"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must hold a checkpoint"):
        checked(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        assert_finite_state(tmp_path / "none")
    as_kept.error(ValueError, assert_finite_state, {})
