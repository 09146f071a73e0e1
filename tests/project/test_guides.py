"""The examples of the guides on many ranks and on production, word for word."""

import functools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import batches, make, train_step
from pages import Examples, guides, pages, run
from ranks import on_ranks
from small_models import LENGTH, VOCABULARY, Small, gpt2, loader_of, sgd
from torch import nn

import overflow_fast

PAGES = [f"docs/guides/{name}.md" for name in ("distributed", "production")]
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


@runs("many-ranks")
def test_exit_code(code, tmp_path, capsys):
    model, optimizer = make()
    with overflow_fast.OverflowGuard(model, optimizer, log=tmp_path / "g"):

        def train():
            model.blocks[0].factor = float("inf")
            train_step(model, optimizer, batches(1)[0])

        with pytest.raises(SystemExit) as status:
            run(code, train=train)
    assert status.value.code == 16 and "\ncode " in capsys.readouterr().err


@runs("flags-of-the-device")
def test_flags(code):
    try:
        run(code, clear_flag=lambda: None, is_flag_set=lambda: False)
        assert overflow_fast.flags.of_devices
    finally:
        overflow_fast.flags.unregister("npu")


def a_rank(folder, code):
    os.chdir(folder)
    known = run(
        code,
        DistributedDataParallel=nn.parallel.DistributedDataParallel,
        model=Small(),
        loader=loader_of(6),
    )
    return known["guard"].step


def a_rank_that_runs_out(code):
    model = nn.parallel.DistributedDataParallel(Small())
    optimizer = sgd(model)
    guard = overflow_fast.OverflowGuard(model, optimizer)
    loader = loader_of(2 * (2 + dist.get_rank()))
    run(code, model=model, optimizer=optimizer, loader=loader, device="cpu")
    return guard.step


@pytest.mark.slow
@runs("ddp")
def test_ddp(tmp_path, code):
    assert on_ranks(2, a_rank, tmp_path, code) == [3, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["guard.rank0.jsonl", "guard.rank1.jsonl"]


@pytest.mark.slow
@runs("ranks-that-run-out-of-batches")
def test_ranks_that_run_out_of_batches(code):
    assert on_ranks(2, a_rank_that_runs_out, code) == [3, 3]


@runs("before-you-save")
def test_saving(code):
    model = Small()
    guard = overflow_fast.OverflowGuard(model, sgd(model))
    run(code, model=model, guard=guard, average=Small())
    assert Path("model.pt").exists()


@runs("before-you-save 2")
def test_what_is_saved(code):
    model = Small()
    torch.save(model.state_dict(), "model.pt")
    run(code, model=model)


@runs("averages-of-weights")
def test_averages(code):
    model = torch.nn.Linear(4, 1)
    ema = torch.optim.swa_utils.AveragedModel(model)
    run(
        code,
        model=model,
        ema=ema,
        optimizer=sgd(model),
        loader=[(torch.ones(2, 4), 1), (torch.full((2, 4), float("inf")), 1)],
        criterion=lambda output, y: (output - y).pow(2).mean(),
    )
    assert Path("ema.pt").exists()
    assert ema.n_averaged == 1


@runs("does-it-work-on-my-model")
def test_self_test(capsys, code, as_kept):
    model = gpt2()
    guard = overflow_fast.OverflowGuard(model, sgd(model))
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    run(code, guard=guard, ids=ids)
    out = capsys.readouterr().out
    as_kept(out)
    table = out.split("other layers")[0].rpartition("\n")[0]
    text = "".join(pages()[page] for page in guides())
    assert f"```\n{table}\n```" in text, table


@runs("an-alert")
def test_an_alert(code):
    model, sent = nn.Linear(8, 1), []
    names = {"model": model, "optimizer": sgd(model)}
    names["send"] = lambda subject, body: sent.append((subject, body))
    guard = run(code, **names)["guard"]
    model(torch.full((2, 8), torch.nan)).sum().backward()
    names["optimizer"].step()
    guard.remove()
    assert guard.last_step_skipped
    ((subject, body),) = sent
    assert subject.startswith("Step 0: `input[0]`") and body.startswith(subject)
    assert "\n" not in subject and body.count("\n") > 2


def test_every_example_is_run():
    assert not runs.untested
