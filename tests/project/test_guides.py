"""The examples of the guides on compiled code, FSDP and long runs, word for word."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import batches
from pages import Examples, run
from small_models import Small, loader_of, sgd
from torch import nn

PAGES = [f"docs/guides/{name}.md" for name in ("compile", "fsdp", "checklist")]
runs = Examples(*PAGES)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@runs("fsdp")
def test_fsdp(code):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])

        def forward(self, x):
            return self.layers[1](self.layers[0](x))

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        names = {"model": Layers(), "criterion": nn.functional.mse_loss}
        known = run(code, **names, loader=batches(2))
        assert known["guard"].step == 2
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@runs("torchcompile")
def test_compiled(code, monkeypatch):
    compiled = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", compiled)
    model = Small()
    names = {"model": model, "optimizer": sgd(model)}
    assert run(code, **names, loader=loader_of(4))["guard"].step == 2


@runs("the-guard-of-the-run")
def test_a_long_run(code):
    pytest.importorskip("safetensors")
    model = nn.Linear(8, 1)
    torch.save(model.state_dict(), "step-900.pt")
    optimizer = sgd(model)
    names = {"model": model, "optimizer": optimizer, "criterion": nn.MSELoss()}
    names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    (x, y), *_ = batches(1)
    known = run(code, **names, loader=[(x, y), (x, y * torch.nan), (x, y)])
    guard = known["guard"]
    guard.remove()
    assert guard.num_skipped == 1 and model.weight.isfinite().all()
    assert Path("guard.jsonl").exists() and list(Path("evidence").iterdir())


def test_every_example_is_run():
    assert not runs.untested
