"""The guide's Python examples, word for word, and the reports that it shows."""

import importlib.util
import logging
import math
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from guarding import batches, make
from made_up_trainer import MadeUpTrainer, two_layers
from pages import ROOT, Examples, assert_shown, examples, guides, run
from small_models import Small, loader_of, quiet, sgd, trainer
from tiny_t5 import forward, push_to_the_limit, t5
from torch import nn

import overflow_fast
from overflow_fast.integrations import torchtitan

OTHERS = {f"docs/guides/{name}.md" for name in ("distributed", "production")}
runs = Examples(*(page for page in guides() if page not in OTHERS))  # test_guides.py
BLOCK = "encoder.block.1.layer.1"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@runs("plain-pytorch")
def test_detector(code):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="inf/nan detected"):
        run(code, model=model, train=lambda m: m(torch.full((1, 2), float("inf"))))
    run(code, model=model, train=lambda m: m(torch.ones(1, 2)))


@runs("on-a-gpu")
@pytest.mark.cuda
def test_cuda_graph(code):
    model = nn.Linear(4, 4).cuda()
    detector = overflow_fast.DebugUnderflowOverflow(model)
    static_input = torch.ones(2, 4, device="cuda")
    model(static_input)
    graph = torch.cuda.CUDAGraph()
    run(code, graph=graph, model=model, static_input=static_input, detector=detector)
    static_input.fill_(float("inf"))
    graph.replay()
    with pytest.raises(ValueError, match="inf/nan detected"):
        detector.check()


@runs("a-loss-outside-of-the-model")
def test_run(code):
    model, x, y = nn.Linear(2, 1), torch.ones(3, 2), torch.zeros(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"model": model, "x": x, "y": y, "optimizer": optimizer}
    with overflow_fast.OverflowGuard(model, optimizer) as guard:
        run(code, guard=guard, criterion=nn.functional.mse_loss, **names)
        with pytest.raises(overflow_fast.NonFiniteError) as caught:
            run(
                code,
                guard=guard,
                criterion=lambda a, b: (-a.abs() - 1).log().sum(),
                **names,
            )
    assert caught.value.report.explanation.op.name == "aten.log"


@runs("which-precision-for-which-layer")
def test_advice(capsys, code):
    model, batch = t5()
    model.float()
    with torch.no_grad():
        model.get_submodule(f"{BLOCK}.DenseReluDense.wo").weight *= 1e6
    run(code, model=model, batches=[batch])
    out = capsys.readouterr().out
    kept = [
        f"{BLOCK}.DenseReluDense.wo",
        f"{BLOCK}.dropout",
        "encoder.final_layer_norm",
    ]
    assert f"keep_in_fp32(model, {kept})" in out
    assert_shown("docs/guide", "Use autocast to", out)


def test_the_explanation_that_is_shown_is_one_of_today():
    kept = ROOT / "tests/golden/logarithm_of_a_sure_discriminator.txt"
    report = kept.read_text().partition("--- report\n")[2]
    assert_shown("docs/guides/explanations", "Step 0: the loss is inf", report)


class Residual(nn.Module):
    """A decoder whose second layer overflows for the row of one request."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(2))
        for layer in self.layers:
            layer["down"] = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](x)
        return self.norm(x)


def overflowing():
    torch.manual_seed(0)
    model = Residual().eval()
    with torch.no_grad():
        model.layers[1]["down"].weight.fill_(1000.0)
    batch = torch.full((3, 8), 1e-2)
    batch[1] = 100.0
    return model.half(), batch.half()


@runs("only-running-the-model")
def test_requests(code):
    model, batch = overflowing()
    with pytest.raises(overflow_fast.NonFiniteError) as caught:
        run(code, model=model, batch=batch)
    assert caught.value.report.requests == ["b"]
    assert_shown("docs/guide", "Request b: ", f"{caught.value}\n")


@runs("only-running-the-model 2")
def test_what_lies_behind_a_model(code):
    model, batch = overflowing()
    with overflow_fast.OverflowGuard(model) as guard:
        with pytest.raises(overflow_fast.NonFiniteError):
            run(code, guard=guard, model=model, batch=batch, pooled=lambda x: x.mean(1))


@runs("which-layers-for-an-export")
def test_layers_for_an_export(capsys, code):
    model, batch = overflowing()
    run(code, model=model.float(), batch=batch.float())
    assert "until=['norm']" in capsys.readouterr().out


@runs("which-layers-for-an-export 2")
def test_export_of_layers(code, monkeypatch):
    """What the exporter would trace, which needs onnx for no more than to write it."""
    graphs = []
    monkeypatch.setattr(
        torch.onnx,
        "export",
        lambda half, given, *_, **__: graphs.append(torch.jit.trace(half, given)),
    )
    model, batch = overflowing()
    model, batch = model.float(), batch.float()
    run(f"import copy\n{code}", model=model, batch=batch)
    assert_near(graphs[0](batch.half()), model(batch), 1e-2)


def assert_near(found, true, tolerance):
    assert (found.float() - true).norm() < tolerance * true.norm()


@runs("behind-a-server")
def test_server(code):
    pytest.importorskip("fastapi")
    testclient = pytest.importorskip("starlette.testclient")
    import fastapi

    model, _ = overflowing()
    known = run(code, model=model, fastapi=fastapi)
    client = testclient.TestClient(known["app"])
    said = {"name": "a", "size": "0.01"}
    assert client.get("/answer", params=said).status_code == 200
    said = {"name": "b", "size": "100"}
    answer = client.get("/answer", params=said)
    assert answer.status_code == 422 and "Request b" in answer.json()["detail"]
    known["guard"].remove()


@runs("trainers-debug-flag")
def test_debug_flag(code):
    debug_utils = pytest.importorskip("transformers.debug_utils")
    original = debug_utils.DebugUnderflowOverflow
    try:
        run(code)
        ours = debug_utils.DebugUnderflowOverflow
        assert issubclass(ours, overflow_fast.DebugUnderflowOverflow)
    finally:
        from overflow_fast.integrations.transformers import uninstall

        uninstall()
    assert debug_utils.DebugUnderflowOverflow is original


@runs("a-tensor")
def test_a_tensor(code):
    expression, comment = code.splitlines()[-1].split("  # ")
    assert str(eval(expression, run(code))) == comment


@runs("the-guard")
def test_guard(code):
    model = Small()
    known = run(code, model=model, optimizer=sgd(model), loader=loader_of(6))
    assert known["guard"].step == 3


@runs("go-on-after-an-error")
def test_going_on_after_an_error(code, capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = sgd(model)
    guard = overflow_fast.OverflowGuard(model, optimizer)
    names = {"model": model, "optimizer": optimizer, "criterion": nn.MSELoss()}
    (x, y), *_ = batches(1)
    loader = [(x, y), (x, y * float("inf")), (x, y), (x, y)]
    run(code, **names, guard=guard, loader=loader)
    out = capsys.readouterr().out
    assert guard.step == 4 and out.count("Step ") == 1 and "Step 1: " in out


@runs("your-own-loop")
def test_own_loop(code):
    model = Small()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard = overflow_fast.OverflowGuard(model, optimizer, on_overflow="skip")
    for factor in (1.0, float("inf")):
        (model(**next(iter(loader_of(2)))).loss * factor).backward()
        run(code, optimizer=optimizer, guard=guard, scheduler=scheduler)
    assert scheduler.last_epoch == 1


@runs("a-trainer-of-your-own")
def test_a_trainer_of_your_own(code):
    callback = run(code)["GuardCallback"](on_overflow="skip")
    data = [{"x": torch.full((4, 2), value)} for value in (1.0, float("nan"), 1.0)]
    trainer = MadeUpTrainer(two_layers(), [callback], validated=data[:1])
    trainer.fit(data)
    assert callback.guard.last_report.verdict.origin.batch_places == ["`batch['x']`"]
    assert (trainer.step, trainer.scheduler.last_epoch, trainer.saved) == (3, 2, [3])


@pytest.mark.slow
@runs("transformers-trainer")
def test_trainer(code):
    known = run(
        code,
        Trainer=lambda *args, **arguments: trainer(callbacks=arguments["callbacks"]),
        model=None,
        arguments=None,
        data=None,
    )
    assert known["callback"].guard.step == 4
    assert Path("guard.jsonl").read_text().count("\n") == 5  # with the header
    assert Path("out/checkpoint-4").is_dir()


@runs("accelerate")
def test_accelerate(code):
    accelerate = pytest.importorskip("accelerate")
    model = Small()
    optimizer = sgd(model)
    known = run(
        code,
        accelerator=accelerate.Accelerator(cpu=True),
        model=model,
        optimizer=optimizer,
        loader=loader_of(8),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
    )
    assert known["guard"].step == 4
    assert any(Path("checkpoint").iterdir())


@runs("lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning(code):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, _ = make()

        def training_step(self, batch, index):
            return self.net(batch[0], y=batch[1])["loss"]

        def configure_optimizers(self):
            return sgd(self)

    known = run(
        code,
        Trainer=quiet(lightning),
        module=Module(),
        loader=torch.utils.data.DataLoader(batches(3), batch_size=None),
    )
    (callback,) = [c for c in known["trainer"].callbacks if hasattr(c, "guard")]
    assert callback.guard.step == 3


class Engine(nn.Module):
    """DeepSpeed's, as a user sees it."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 1)
        self.optimizer = sgd(self.module)
        self.global_steps = 7

    def forward(self, x):
        return self.module(x).sum()

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


@runs("deepspeed")
def test_deepspeed(code):
    names = run(code, engine=Engine(), loader=[torch.full((1, 2), float("nan"))])
    assert names["guard"].num_skipped == 1
    assert names["guard"].last_report.step == 7


@runs("under-trainer-and-accelerate")
def test_deepspeed_under_trainer(code):
    def trainer(model, arguments, callbacks):
        return arguments, callbacks

    names = run(code, model=None, Trainer=trainer, TrainingArguments=dict_of)
    arguments, (callback,) = names["trainer"]
    assert arguments["deepspeed"] and not callback.raises


def dict_of(folder, **arguments):
    return arguments


@runs("torchtitan")
def test_torchtitan(code, monkeypatch):
    class Trainer:
        def __init__(self):
            self.model_parts = [nn.Linear(2, 1)]
            self.optimizers = sgd(self.model_parts[0])
            self.lr_schedulers = torch.optim.lr_scheduler.StepLR(self.optimizers, 1)
            self.step = 0

        def train_step(self, batches):
            self.model_parts[0](next(batches)).sum().backward()
            self.optimizers.step()
            self.lr_schedulers.step()

        def train(self):
            self.step += 1
            self.train_step(iter([torch.full((1, 2), float("nan"))]))

        def close(self):
            pass

    def parse_args(self):
        return types.SimpleNamespace(build=Trainer)

    config = types.ModuleType("torchtitan.config")
    config.ConfigManager = type("ConfigManager", (), {"parse_args": parse_args})
    monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.config", config)
    names = run(code)
    assert names["guard"].last_report.step == 1
    assert names["trainer"].lr_schedulers.last_epoch == 0


@runs("torchtitan 2")
def test_torchtitan_that_ends_before_the_optimizer(code):
    class Trainer:
        """Steps as torchtitan's sources of August 2026 do."""

        def __init__(self):
            self.model_parts = [nn.Linear(2, 1)]
            self.optimizers = sgd(self.model_parts[0])
            self.lr_schedulers = torch.optim.lr_scheduler.StepLR(self.optimizers, 1)
            self.step = 0

        def forward_backward_step(self, *, input_dict):
            loss = self.model_parts[0](input_dict["input"]).sum()
            loss.backward()
            return loss

        def train_step(self, batches):
            loss = self.forward_backward_step(input_dict={"input": next(batches)})
            torch._assert_async(loss.isfinite(), "Loss or gradient norm is not finite")
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.lr_schedulers.step()

        def train(self, batches):
            for batch in batches:
                self.step += 1
                self.train_step(iter([batch]))

    trainer = Trainer()
    guard = torchtitan.guard_with(trainer)
    run(code, trainer=trainer, guard=guard)
    with pytest.raises(overflow_fast.NonFiniteError, match="Step 3: "):
        trainer.train(torch.full((1, 2), value) for value in (1.0, 1.0, math.nan))
    assert trainer.lr_schedulers.last_epoch == 2


@runs("trl")
def test_trl(code, monkeypatch):
    trl = types.ModuleType("trl")
    trl.GRPOTrainer = lambda model, reward, train_dataset, callbacks: callbacks
    monkeypatch.setitem(sys.modules, "trl", trl)
    (callback,) = run(code, model=None, reward=None, prompts=None)["trainer"]
    assert callback.raises


@runs("megatron-core")
def test_megatron(code):
    model = nn.Linear(2, 1)
    names = run(code, model=[model], optimizer=sgd(model))
    assert names["guard"].enabled


@runs("intended-infs-and-nans")
def test_rules(code):
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
    guard = run(code, model=model, optimizer=optimizer)["guard"]
    guard.record(log_probs=torch.tensor([float("nan"), float("-inf")]))
    model.layers[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert guard.coverage().rules_unused == ["layers.*.router:output"]


@runs("numbers-for-dashboards")
def test_metrics(code):
    pytest.importorskip("tensorboard")
    prometheus = pytest.importorskip("prometheus_client")
    model = Small()
    optimizer = sgd(model)
    known = run(code, model=model, optimizer=optimizer)
    optimizer.step()
    optimizer.step()
    known["guard"].remove()
    assert list(Path("runs/guard").iterdir())
    assert b"overflow_fast_steps_total 2.0" in prometheus.generate_latest()
    for gauge in known["gauges"].values():
        prometheus.REGISTRY.unregister(gauge)


@runs("a-monitor-of-your-own")
def test_a_monitor_of_ones_own(code, caplog, as_kept):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias[:5] = -1e3
    optimizer = sgd(model)
    guard = run(code, model=model, optimizer=optimizer)["guard"]
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    guard.remove()
    as_kept(caplog.messages)


@runs("a-flight-record")
def test_flight_record(code):
    pytest.importorskip("pandas")

    def train(model, optimizer):
        for batch in loader_of(4):
            model(**batch).loss.backward()
            optimizer.step()

    model = Small()
    known = run(code, model=model, optimizer=sgd(model), train=train)
    assert known["last"].first == 1 and known["last"].loss > 0
    assert known["largest"].shape == known["bits"].shape
    assert known["first_bad"].numel() == 0
    assert len(known["table"]) > 0


@runs("a-page")
def test_page(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Small()
    with overflow_fast.OverflowGuard(model, sgd(model)) as guard:
        run(code, guard=guard)
    assert Path("run.html").exists()


@runs("in-tests")
def test_tests(code):
    model, trained, guards = Small(), [], []

    def guard(model):
        guards.append(overflow_fast.OverflowGuard(model))

    known = run(code, pytest=pytest, model=model, train=trained.append, x=1)
    assert known["test_training"].pytestmark[0].kwargs == {"watch": "tripwire"}
    known["model"] = nn.Linear(2, 1)
    known["x"] = torch.ones(1, 2)
    known["test_gradients"](guard)
    assert guards[0].check() is None


@runs("a-debug-flag")
def test_a_debug_flag(code, monkeypatch):
    make_detector = run(code)["debug_overflow"]
    model = nn.Linear(2, 2)
    for is_there in (True, False):
        if not is_there:
            monkeypatch.setitem(sys.modules, "overflow_fast", None)
            pytest.importorskip("transformers.debug_utils", exc_type=ImportError)
        detector = make_detector(model)
        package = type(detector).__module__.partition(".")[0]
        assert package == ("overflow_fast" if is_there else "transformers")
        with pytest.raises(ValueError, match="inf/nan"):
            model(torch.full((1, 2), float("inf")))
        if is_there:
            detector.remove()


@runs("a-debug-flag 2")
def test_a_monitor_with_steps_and_a_file(code, tmp_path, monkeypatch):
    monitor_of = run(code)["monitor_of"]
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    with monitor_of(model, optimizer, tmp_path, None) as monitor:
        monitor.set_step(7)
        model(torch.full((1, 2), float("inf"))).sum().backward()
        with pytest.raises(overflow_fast.NonFiniteError, match="Step 7"):
            optimizer.step()
    assert (tmp_path / "debug" / "guard.jsonl").exists()
    monkeypatch.setitem(sys.modules, "overflow_fast", None)
    assert monitor_of(model, optimizer, tmp_path, lambda *given: given[0]) is model


PARTS = "a-training-loop-with-parts-of-a-model"
CAUGHT = examples()[f"docs/guides/optional.md#{PARTS} 2"]
runs.untested.discard(f"{PARTS} 2")


@runs(PARTS)
def test_parts_of_a_model(code, caplog, monkeypatch):
    parts = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    guard_of = run(code, importlib=importlib)["guard_of"]
    with guard_of(parts, optimizers):
        parts[1](parts[0](torch.full((1, 2), float("inf")))).sum().backward()
        logger = logging.getLogger("library")
        with pytest.raises(overflow_fast.NonFiniteError):
            run(CAUGHT, optimizer=optimizers[0], logger=logger)
    assert "Step 0: `input[0]` of 0" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert guard_of(parts, optimizers) is None


@runs("a-list-of-callbacks")
def test_callbacks(code, monkeypatch):
    pytest.importorskip("lightning")
    callbacks_for = run(code, importlib=importlib)["callbacks_for"]
    (callback,) = callbacks_for(True)
    assert type(callback).__name__ == "LightningGuardCallback"
    assert callbacks_for(False) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert callbacks_for(True) == []


def test_the_lines_for_an_agent():
    text = (ROOT / "AGENTS.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    model = nn.Linear(2, 1)
    names = {"model": model, "optimizer": sgd(model), "criterion": nn.MSELoss()}
    bad = (torch.full((3, 2), float("nan")), torch.ones(3, 1))
    with pytest.raises(overflow_fast.NonFiniteError):
        run(code, **names, loader=[(torch.ones(3, 2), torch.ones(3, 1)), bad])


class Normed(Small):
    """A language model with a normalization."""

    def __init__(self, eps):
        super().__init__()
        self.embed = nn.Sequential(self.embed, nn.LayerNorm(8, eps))


def make_normed():
    found = []
    for eps in (1e-5, 0.1):
        torch.manual_seed(0)
        found.append(Normed(eps))
    return found


@runs("record-and-compare")
def test_comparison(capsys, code, as_kept):
    batch = next(iter(loader_of(2)))

    def step(model):
        model(**batch).loss.backward()

    model, other = make_normed()
    run(code, model=model, other=other, step=step)
    out = capsys.readouterr().out
    as_kept(out)
    assert Path("diff.html").exists()


@runs("without-files")
def test_live_comparison(code):
    model, other = make_normed()
    known = run(code, model=model, other=other, batch=next(iter(loader_of(2))))
    assert known["diff"].first is None


@runs("the-samples-index-in-the-data-set")
def test_a_data_set_that_knows_its_indices(code):
    x = torch.rand(24, 2)
    x[17] = 1000.0
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    optimizer = sgd(model)
    with overflow_fast.OverflowGuard(model, optimizer) as guard:
        names = {"guard": guard, "model": model, "optimizer": optimizer}
        with pytest.raises(overflow_fast.NonFiniteError) as caught:
            run(
                code,
                data=torch.utils.data.TensorDataset(x, torch.ones(24, 1)),
                loss_of=lambda model, b: (model(b["x"]) - b["y"]).exp().mean(),
                **names,
            )
    assert caught.value.report.explanation.sample.dataset == 17


def test_the_guide_shows_a_report_of_today(capsys):
    model, batch = t5()
    push_to_the_limit(model, batch)
    with pytest.raises(ValueError) as error:
        with overflow_fast.DebugUnderflowOverflow(model):
            forward(model, batch)
    report = f"{capsys.readouterr().out}\nValueError: {error.value}"
    assert_shown("docs/guide", "output has infs", report)
    overflow_fast.keep_in_fp32(model, ["encoder"])
    assert torch.isfinite(torch.tensor(forward(model, batch)))


def test_every_example_is_run():
    assert not runs.untested
