"""The examples of the guides on many ranks and on production, word for word."""

import contextlib
import email.message
import functools
import http.server
import json
import os
import smtplib
import socketserver
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from guarding import batches, make, train_step
from pages import Examples, examples, guides, pages, run
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


FIRST_LINE = examples()["docs/guides/production.md#an-alert"]
runs.untested.discard("an-alert")  # each of the others runs it
LINE = "exp-7, epoch 2, batch 5: Step 0: `input[0]` of the model (Linear) holds"


def alert_of(code, **names):
    """Runs a recipe with a bad step, which is skipped; returns the first line."""
    loop = {"run_name": "exp-7", "epoch": 2, "i": 5}
    first_line = run(FIRST_LINE, **loop)["first_line"]
    model = nn.Linear(8, 1)
    optimizer = sgd(model)
    known = run(code, model=model, optimizer=optimizer, first_line=first_line, **names)
    guard = known["guard"]
    model(torch.full((2, 8), torch.nan)).sum().backward()
    optimizer.step()
    guard.remove()
    assert guard.last_step_skipped
    return first_line(guard.last_report)


@pytest.fixture
def posted():
    """A server that takes what is posted: its address, and the bodies."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", bodies
        server.shutdown()


@pytest.fixture
def mailed():
    """A server of SMTP: its port, and the messages."""
    messages = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.answer("220 ready")
            while word := self.rfile.readline()[:4].strip().upper():
                self.answer("354 go on" if word == b"DATA" else "250 fine")
                if word == b"DATA":
                    lines = iter(self.rfile.readline, b".\r\n")
                    messages.append(email.message_from_bytes(b"".join(lines)))
                    self.answer("250 fine")

        def answer(self, text):
            self.wfile.write(f"{text}\r\n".encode())

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], messages
        server.shutdown()


@runs("an-alert 2")
def test_an_alert_to_slack(code, posted):
    modules = {"json": json, "urllib": urllib, "contextlib": contextlib}
    address, bodies = posted
    line = alert_of(code, webhook=address, **modules)
    (body,) = bodies
    text = json.loads(body)["text"]
    assert text.startswith(f"{line}\n```Step 0: ") and line.startswith(LINE)
    assert alert_of(code, webhook="http://127.0.0.1:9/", **modules) == line


@runs("an-alert 3")
def test_an_alert_by_e_mail(code, mailed):
    modules = {"email": email, "smtplib": smtplib, "contextlib": contextlib}
    port, messages = mailed
    names = {"people": ["a@example.com", "b@example.com"], "host": "127.0.0.1"}
    line = alert_of(code, port=port, **names, **modules)
    (message,) = messages
    assert " ".join(message["Subject"].split()) == line and line.startswith(LINE)
    assert "Step 0: " in message.get_payload(decode=True).decode()
    assert alert_of(code, port=9, **names, **modules) == line


@runs("an-alert 4")
def test_an_alert_of_prometheus(code):
    client = pytest.importorskip("prometheus_client")
    server, thread = client.start_http_server(0, "127.0.0.1")
    line = alert_of(code, prometheus_client=client)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as page:
        text = page.read().decode()
    server.shutdown()
    thread.join()
    assert 'nonfinite_steps_total{place="the model"} 1.0' in text
    assert f'nonfinite_last_info{{line="{line}"}} 1.0' in text


def test_every_example_is_run():
    assert not runs.untested
