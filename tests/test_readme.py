"""The examples of the README's chapter on real runs, word for word."""

import functools
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from guarding import batches, make
from ranks import on_ranks
from torch import nn

import overflow_fast

README = (Path(__file__).parent.parent / "README.md").read_text()
VOCABULARY, LENGTH = 50, 8


@functools.cache
def examples():
    """The Python examples of the chapter, by their headings."""
    chapter = README.split("\n## In real runs\n")[1].split("\n## ")[0]
    found = {}
    for section in chapter.split("\n### ")[1:]:
        heading, _, text = section.partition("\n")
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            found[heading] = found.get(heading, "") + code
    return found


def run(heading, **names):
    """Runs an example where these names are known; returns what is known afterwards."""
    known = {"torch": torch, "overflow_fast": overflow_fast, **names}
    exec(examples()[heading], known)
    return known


def gpt2():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2
        )
    )


def texts(count):
    ids = torch.randint(0, VOCABULARY, (count, LENGTH))
    return [{"input_ids": row, "labels": row} for row in ids]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_example_is_run():
    names = {name for name in globals() if name.startswith("test_")}
    assert len(examples()) == 8
    assert len(names) == len(examples()) + 1


def test_trainer():
    arguments = hf.TrainingArguments(
        output_dir="out", max_steps=4, use_cpu=True, report_to=[], save_steps=2
    )
    known = run(
        "transformers' Trainer",
        Trainer=hf.Trainer,
        model=gpt2(),
        arguments=arguments,
        data=texts(32),
    )
    assert known["callback"].guard.step == 4
    assert Path("guard.jsonl").read_text().count("\n") == 5  # with the header
    assert Path("out/checkpoint-4").is_dir()


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = gpt2()
    optimizer = sgd(model)
    known = run(
        "Accelerate",
        accelerator=accelerate.Accelerator(cpu=True),
        model=model,
        optimizer=optimizer,
        loader=torch.utils.data.DataLoader(texts(8), batch_size=2),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    assert known["guard"].step == 4
    assert any(Path("checkpoint").iterdir())


@pytest.mark.filterwarnings("ignore")
def test_lightning():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, _ = make()

        def training_step(self, batch, index):
            return self.net(batch[0], y=batch[1])["loss"]

        def configure_optimizers(self):
            return sgd(self)

    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    known = run(
        "Lightning",
        Trainer=functools.partial(lightning.Trainer, **quiet),
        module=Module(),
        loader=torch.utils.data.DataLoader(batches(3), batch_size=None),
    )
    (callback,) = [c for c in known["trainer"].callbacks if hasattr(c, "guard")]
    assert callback.guard.step == 3


def a_rank(folder):
    os.chdir(folder)
    count = 2 + dist.get_rank()  # ranks run out of batches
    known = run(
        "DDP",
        DistributedDataParallel=nn.parallel.DistributedDataParallel,
        model=gpt2(),
        loader=torch.utils.data.DataLoader(texts(2 * count), batch_size=2),
    )
    return known["guard"].step


def test_ddp(tmp_path):
    assert on_ranks(2, a_rank, tmp_path) == [3, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["guard.rank0.jsonl", "guard.rank1.jsonl"]


def test_rules():
    class Attention(nn.Linear):
        def forward(self, x, attn_mask=None):
            return super().forward(x)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.router = Attention(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.router(self.attn(x, attn_mask=torch.full((1,), float("inf"))))

    model = nn.Module()
    model.layers = nn.ModuleList([Layer()])
    optimizer = sgd(model)
    guard = run("What is not finite on purpose", model=model, optimizer=optimizer)[
        "guard"
    ]
    guard.record(log_probs=torch.tensor([float("nan"), float("-inf")]))
    model.layers[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert guard.coverage().rules_unused == ["layers.*.router:output"]


def test_metrics():
    pytest.importorskip("tensorboard")
    prometheus = pytest.importorskip("prometheus_client")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = examples()["Numbers for dashboards"]
    assert "port=9400" in code
    examples()["Numbers for dashboards"] = code.replace("9400", str(port))
    model = gpt2()
    optimizer = sgd(model)
    known = run("Numbers for dashboards", model=model, optimizer=optimizer)
    optimizer.step()
    known["guard"].remove()
    assert list(Path("runs/guard").iterdir())
    assert b"overflow_fast_steps_total" in prometheus.generate_latest()
    prometheus.REGISTRY.unregister(known["exporters"][1])


def test_saving():
    model = gpt2()
    guard = overflow_fast.OverflowGuard(model, sgd(model))
    run("Before you save", model=model, guard=guard, average=gpt2())
    assert Path("model.pt").exists()


def test_self_test(capsys):
    model = gpt2()
    guard = overflow_fast.OverflowGuard(model, sgd(model))
    ids = torch.randint(0, VOCABULARY, (2, LENGTH))
    run("Does it work on my model?", guard=guard, ids=ids)
    out = capsys.readouterr().out
    assert "16 of 16 planted faults were caught and attributed" in out
    table = out.split("other layers")[0].rpartition("\n")[0]
    assert f"```\n{table}\n```" in README, table
