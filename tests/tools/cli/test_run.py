"""overflow-fast run: scripts that know nothing of the guard."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from processes import python

import overflow_fast

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

MODEL = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
"""
PLAIN = f"""{MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
bad = int(sys.argv[1])
for step in range(3):
    x = torch.full((8, 4), float("inf") if step == bad else 1.0)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("after step", step)
sys.exit(7)
"""


def run(tmp_path, script, *arguments, options=(), environment=None):
    path = tmp_path / "train.py"
    path.write_text(script)
    return python(
        "-m",
        *("overflow_fast", "run", *options, str(path), *arguments),
        cwd=tmp_path,
        environment=environment,
    )


def said_by_us(done):
    """What the command says, the headlines of reports, and the line at the end."""
    opening = ("overflow_fast", "[overflow_fast] Step")
    lines = done.stderr.splitlines()
    return [e for e in lines if e.startswith(opening) or "steps watched" in e]


@pytest.mark.day
def test_the_first_step_of_a_plain_loop_is_guarded_and_explained(tmp_path, as_kept):
    done = run(tmp_path, PLAIN, "0")
    assert done.returncode == 3
    assert done.stdout == ""
    assert "NonFiniteError: Step 0: " in done.stderr
    assert "Bad data: `input`" in done.stderr
    # As with `python train.py`, the first frame of the traceback is the script's.
    first = done.stderr.split("Traceback (most recent call last):\n")[1]
    lines = first.lstrip().splitlines()
    as_kept([line for line in lines if line.strip("^~ ")])  # their place is Python's
    assert first.count("  File ") == 1  # and the last one, too


def test_a_finite_run_ends_as_without_the_guard(tmp_path):
    done = run(tmp_path, PLAIN, "-1")
    assert done.returncode == 7
    assert done.stdout.splitlines() == [f"after step {i}" for i in range(3)]
    assert done.stderr == ""


def test_options_are_the_guards_arguments(tmp_path):
    options = ("--on-overflow", "skip", "--record", "run.ofr", "--log", "log.jsonl")
    done = run(tmp_path, PLAIN, "1", options=options)
    assert done.returncode == 7
    assert "Step 1: " in done.stderr
    record = overflow_fast.read_record(tmp_path / "run.ofr")
    assert [step.action for step in record.steps] == [None, "skip", None]
    assert (tmp_path / "log.jsonl").read_text().count('"kind": "step"') == 3


@pytest.mark.parametrize("options", [("--every", "0"), ("--watch", "wights")])
def test_a_wrong_option_is_named_before_the_script_runs(tmp_path, options, as_kept):
    done = run(tmp_path, PLAIN, "-1", options=options)
    assert (done.returncode, done.stdout) == (2, "")
    as_kept(done.stderr)


GAN = """
import torch
from torch import nn
generator, critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 1))
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for step in range(3):
    z = torch.full((8, 3), float("nan") if step == 1 else 0.5)
    of_critic.zero_grad()
    critic(generator(z).detach()).mean().backward()
    of_critic.step()
    of_generator.zero_grad()
    critic(generator(z)).mean().backward()
    of_generator.step()
print(all(p.isfinite().all() for m in (generator, critic) for p in m.parameters()))
"""


def test_two_models_and_two_optimizers_share_a_guard(tmp_path, as_kept):
    done = run(tmp_path, GAN, options=("--on-overflow", "skip"))
    assert done.stdout == "True\n", done.stderr
    as_kept(said_by_us(done))


OWN_GUARD = f"""{MODEL}
import overflow_fast
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
guard = overflow_fast.OverflowGuard(model, optimizer, on_overflow="skip")
for _ in range(2):
    model(torch.full((8, 4), float("nan"))).mean().backward()
    optimizer.step()
print(guard.num_skipped)
"""


def test_a_script_with_a_guard_of_its_own_has_no_second_one(tmp_path, as_kept):
    done = run(tmp_path, OWN_GUARD)
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert "Another OverflowGuard" not in done.stderr
    as_kept(said_by_us(done))


@pytest.mark.parametrize(
    "script",
    [
        "print('hello')",
        f"{MODEL}\noptimizer = torch.optim.SGD(model.parameters())\nmodel(torch."
        "ones(1, 4))",
        "import torch\nw = torch.ones(2, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w])\nw.sum().backward()\noptimizer.step()",
    ],
)
def test_a_run_without_a_guarded_step_says_why(tmp_path, script, as_kept):
    done = run(tmp_path, script)
    assert done.returncode == 0
    as_kept(said_by_us(done))
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("end", ["", "\nimport sys\nsys.exit(0)"])
def test_a_healthy_run_ends_with_what_was_watched(tmp_path, end, as_kept):
    script = f"""{MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(8, 4)).mean().backward()
    optimizer.step()
{end}"""
    done = run(tmp_path, script)
    assert done.returncode == 0
    as_kept(said_by_us(done))
    assert done.stderr.count("\n") == 1


LATE_MODEL = f"""{MODEL}
first = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 4)).mean().backward()
first.step()
other = nn.Linear(4, 4)
second = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1)
raise RuntimeError
"""


def test_steps_count_whose_guard_gave_way_to_a_new_one(tmp_path, as_kept):
    done = run(tmp_path, LATE_MODEL)
    as_kept(said_by_us(done))
    assert "RuntimeError" in done.stderr


def test_an_interrupt_ends_the_script_as_python_does(tmp_path):
    (tmp_path / "train.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "overflow_fast", "run", "train.py"]
    package = os.path.dirname(os.path.dirname(overflow_fast.__file__))
    found = {"capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": package}, **found)
    assert done.stderr.endswith("KeyboardInterrupt\n")
    assert done.returncode == -signal.SIGINT


def test_a_wrong_syntax_is_shown_as_python_shows_it(tmp_path):
    done = run(tmp_path, "f(\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr and done.stderr.count("  File ") == 1


OF_NO_MODULE = pytest.mark.parametrize(
    "options", [("--include", "zzz*"), ("--config", "rules.toml")], ids=" ".join
)


@pytest.fixture
def rules(tmp_path):
    (tmp_path / "rules.toml").write_text('allow = {"*.zzz:output" = "-inf"}')


@OF_NO_MODULE
@pytest.mark.usefixtures("rules")
def test_a_pattern_of_no_module_ends_the_run_before_a_step(tmp_path, options, as_kept):
    done = run(tmp_path, PLAIN, "-1", options=options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    as_kept(said_by_us(done))


LATER_MODEL = f"""{MODEL}
first = torch.optim.SGD(model.parameters(), lr=0.1)
other = nn.Sequential()
other.later = nn.Linear(4, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
other(torch.full((8, 4), float("nan"))).mean().backward()
second.step()
"""


def test_a_pattern_may_be_that_of_a_later_model(tmp_path):
    done = run(tmp_path, LATER_MODEL, options=("--include", "later"))
    assert done.returncode == 3
    assert "later (Linear)" in done.stderr


COPIED = f"""{MODEL}
import copy
model, optimizer = copy.deepcopy((model, torch.optim.SGD(model.parameters(), 0.1)))
for value in (1.0, 1.0, float("nan")):
    model(torch.full((8, 4), value)).mean().backward()
    optimizer.step()
"""


def test_an_optimizer_that_was_copied_is_guarded_from_its_second_step_on(tmp_path):
    done = run(tmp_path, COPIED)
    assert done.returncode == 3
    assert "Step 1: " in done.stderr


COMPILED = f"""{MODEL}
@torch.compile(fullgraph=True, backend="eager")
def loss_of(x):
    return model(x).pow(2).mean()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for value in (1.0, float("nan")):
    loss_of(torch.full((8, 4), value)).backward()
    optimizer.step()
"""


def test_a_loss_that_is_compiled_as_a_whole_stays_one_graph(tmp_path):
    done = run(tmp_path, COMPILED)
    assert done.returncode == 3
    assert "Step 1: " in done.stderr


ACCELERATE = f"""{MODEL}
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
for value in (1.0, float("nan"), 1.0):
    accelerator.backward(model(torch.full((8, 4), value)).mean())
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
print(schedule.scheduler.last_epoch)
"""


def test_a_script_with_accelerate(tmp_path, as_kept):
    done = run(tmp_path, ACCELERATE, options=("--on-overflow", "skip"))
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    as_kept(said_by_us(done))


ENGINE = f"""{MODEL}
class Sharing:  # steps copies of the weights, and leaves out what is not finite
    def __init__(self, optimizer):
        self.optimizer, self.num_overflows = optimizer, 0
        group, = optimizer.param_groups
        self.weights = group["params"]
        group["params"] = [w.detach().double() for w in self.weights]
        for copy in group["params"]:
            copy.grad = torch.zeros_like(copy)
        optimizer.step()  # makes its state
    param_groups = property(lambda self: self.optimizer.param_groups)
    def step(self):
        if not all(w.grad.isfinite().all() for w in self.weights):
            self.num_overflows += 1
            return
        pairs = zip(self.weights, self.param_groups[0]["params"])
        for weight, copy in pairs:
            copy.grad = weight.grad.double()
        self.optimizer.step()
        for weight, copy in zip(self.weights, self.param_groups[0]["params"]):
            weight.data.copy_(copy)
class Engine(nn.Module):
    def __init__(self, module, optimizer):
        super().__init__()
        self.module, self.sharing = module, Sharing(optimizer)
    def forward(self, x):
        return self.module(x)
    def backward(self, loss):
        loss.backward()
    def step(self):
        self.sharing.step()
        self.zero_grad()
engine = Engine(model, torch.optim.Adam(model.parameters()))
for step in range(4):
    x = torch.full((8, 4), float("nan") if step == 2 else 1.0)
    engine.backward(engine(x).mean())
    before = next(model.parameters()).detach().clone()
    engine.step()
    print(int(torch.equal(before, next(model.parameters()))), end="")
print(engine.sharing.num_overflows)
"""


def test_a_script_with_an_engine_that_steps_on_its_own_terms(tmp_path, as_kept):
    done = run(tmp_path, ENGINE, options=("--on-overflow", "skip"))
    assert (done.returncode, done.stdout) == (0, "00100\n"), done.stderr
    assert "Step 2: " in done.stderr
    as_kept(said_by_us(done))


RANKS = f"""{MODEL}
import torch.distributed as dist
dist.init_process_group("gloo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # before DDP
model = nn.parallel.DistributedDataParallel(model)
for step in range(2):
    is_bad = step == 1 and dist.get_rank() == 1
    model(torch.full((8, 4), float("nan") if is_bad else 1.0)).mean().backward()
    optimizer.step()
"""


def test_two_ranks_with_the_environment_of_torchrun_decide_together(tmp_path, as_kept):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank(i):
        environment = {**os.environ, **of_all, "RANK": str(i), "LOCAL_RANK": str(i)}
        (tmp_path / str(i)).mkdir()
        return run(tmp_path / str(i), RANKS, environment=environment)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank, range(2)))
    for done in ranks:
        assert done.returncode == 3, done.stderr
        lines = done.stderr.splitlines()
        as_kept([each for each in lines if "NonFiniteError: " in each])


TRAINER = f"""{MODEL}
from transformers import Trainer, TrainingArguments, PretrainedConfig, PreTrainedModel
class Model(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self):
        super().__init__(PretrainedConfig())
        self.body = model
    def forward(self, x, labels=None):
        y = self.body(x)
        return {{"loss": y.mean(), "y": y}}
data = [dict(x=torch.full((4,), v)) for v in (1.0, float(sys.argv[1]), 1.0)]
arguments = TrainingArguments("out", per_device_train_batch_size=1, use_cpu=True,
    report_to="none", save_strategy="no", debug=sys.argv[2], disable_tqdm=True,
    remove_unused_columns=False, seed=0)
Trainer(Model(), arguments, train_dataset=data).train()
"""


def test_a_trainer_gets_the_callback(tmp_path, as_kept):
    done = run(tmp_path, TRAINER, "nan", "", options=("--on-overflow", "skip"))
    assert done.returncode == 0, done.stderr
    as_kept(said_by_us(done))


@OF_NO_MODULE
@pytest.mark.usefixtures("rules")
def test_a_pattern_of_no_module_ends_a_trainer_too(tmp_path, options, as_kept):
    done = run(tmp_path, TRAINER, "1", "", options=options)
    assert done.returncode == 2
    as_kept(said_by_us(done))


def test_a_guard_of_the_script_with_such_a_pattern_has_its_traceback(tmp_path):
    made = "import overflow_fast\noverflow_fast.OverflowGuard(model, include=['zzz'])"
    done = run(tmp_path, f"{MODEL}\n{made}")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "'zzz' matches none" in done.stderr


def test_a_trainer_that_asks_for_the_detector_gets_no_guard(tmp_path, as_kept):
    done = run(tmp_path, TRAINER, "nan", "underflow_overflow")
    assert done.returncode == 1
    assert "DebugUnderflowOverflow: inf/nan detected" in done.stderr
    as_kept(said_by_us(done))
    assert "overflow_fast/detector/debug.py" not in done.stderr


LIGHTNING = f"""{MODEL}
import lightning.pytorch as lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = model
    def training_step(self, batch, index):
        return self.body(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.ones(3, 4)
data[1] = float("nan")
lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Module(), torch.utils.data.DataLoader(data))
"""


def test_lightning_gets_the_callback(tmp_path, as_kept):
    pytest.importorskip("lightning.pytorch")
    done = run(tmp_path, LIGHTNING, options=("--on-overflow", "skip"))
    assert done.returncode == 0, done.stderr
    as_kept(said_by_us(done))


OWN = f"""{MODEL}
import overflow_fast
own = sys.argv[1]
if own == "detector":
    detector = overflow_fast.DebugUnderflowOverflow(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if own == "guard":
    guard = overflow_fast.OverflowGuard(model, optimizer)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else None)
"""


@pytest.mark.parametrize("ends", [(), ("0",), ("7",)])
@pytest.mark.parametrize("own", ["guard", "detector", "none"])
def test_options_that_a_guard_of_the_programs_does_not_get(
    tmp_path, own, ends, as_kept
):
    options = ("--record", "r.ofr", "--log", "l.jsonl")
    done = run(tmp_path, OWN, own, *ends, options=options)
    is_refused = own != "none" and ends != ("7",)
    assert done.returncode == (7 if ends == ("7",) else 2 * is_refused), done.stderr
    as_kept(said_by_us(done))
    assert (tmp_path / "r.ofr").exists() == (own == "none")
    done = run(tmp_path, OWN, own)
    assert done.returncode == 0
    assert own != "detector" or done.stderr == ""


RAISES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(4, 3) * (float("inf") if step == 2 else 1)
    loss = -torch.distributions.Normal(model(x), 1.0).log_prob(torch.zeros(2)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_exception_of_the_programs_own_is_printed_with_the_report(tmp_path):
    log = tmp_path / "guard.jsonl"
    done = run(tmp_path, RAISES, options=("--log", str(log)))
    assert done.returncode == 1
    error, _, after = done.stderr.partition("ValueError: Expected parameter loc")
    assert "Traceback (most recent call last):" in error
    if sys.version_info >= (3, 11):
        assert "Step 2: " in after and "Bad data" in after
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["step"], last["is_clean"]) == (2, False)


# Scripts that only run models.

SERVED = """
import sys, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        return self.down(self.up(x) * scale)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(4)

    def forward(self, x, *, scale=1.0):
        return self.norm(self.second(self.first(x), scale))

torch.manual_seed(0)
net = Net().half().eval()
"""
SERVE = f"""{SERVED}
with torch.inference_mode():
    for i in range(3):
        scale = 1e6 if str(i) in sys.argv else 1.0
        net(torch.ones(2, 4).half(), scale=torch.tensor(scale))
        print("served", i)
"""


@pytest.mark.parametrize("bad", [0, 1])
def test_a_script_that_only_runs_a_model_ends_with_its_first_bad_request(tmp_path, bad):
    done = run(tmp_path, SERVE, str(bad))
    assert done.returncode == 3
    assert done.stdout == "".join(f"served {i}\n" for i in range(bad))
    assert f"NonFiniteError: Request {bad}: " in done.stderr
    assert "code      return self.down(self.up(x) * scale)" in done.stderr
    assert "replayed" not in done.stderr


def test_each_bad_request_of_a_script_is_a_warning(tmp_path):
    done = run(tmp_path, SERVE, "0", "2", options=("--on-overflow", "warn"))
    assert (done.returncode, done.stdout.count("served")) == (0, 3)
    assert [n for n in range(3) if f"] Request {n}: " in done.stderr] == [0, 2]


def test_clean_requests_of_a_script_are_counted(tmp_path, as_kept):
    done = run(tmp_path, SERVE)
    assert done.returncode == 0
    as_kept(said_by_us(done))


def test_a_scripted_model_of_a_pipeline_leaves_the_others_watched(tmp_path):
    script = f"""{SERVED}
first = torch.jit.script(nn.Linear(4, 4).half())
with torch.no_grad():
    x = first(torch.ones(2, 4).half())
    net(x, scale=torch.tensor(1e6))
"""
    done = run(tmp_path, script)
    assert done.returncode == 3 and "Request 0: " in done.stderr
    assert done.stderr.count("Traceback") == 1  # of the request alone


def test_the_models_of_a_pipeline_are_told_apart_as_they_first_run(tmp_path):
    script = f"""{SERVED}
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Net()

vae = Vae().half()
with torch.no_grad():
    latent = net(torch.ones(2, 4).half())
    vae.decoder(latent, scale=torch.tensor(1e6))
"""
    done = run(tmp_path, script)
    assert done.returncode == 3
    assert "Request 1: " in done.stderr and "Vae.decoder.second" in done.stderr


def test_what_a_script_runs_before_it_trains_is_judged_and_then_its_steps(tmp_path):
    script = (
        SERVE
        + """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in (1.0, float("nan")):
    net(torch.full((2, 4), x).half()).sum().backward()
    optimizer.step()
    print("after a step")
"""
    )
    done = run(tmp_path, script, "1", options=("--on-overflow", "warn"))
    assert done.returncode == 0 and "] Request 1: " in done.stderr
    assert done.stdout.count("after a step") == 2
    assert "Step 1: " in done.stderr and "Another OverflowGuard" not in done.stderr


def test_a_serving_script_with_a_guard_of_its_own_has_no_second_one(tmp_path):
    own = "import overflow_fast\nguard = overflow_fast.OverflowGuard(net, 'warn')\n"
    own = own.replace("'warn'", "on_overflow='warn'")
    done = run(tmp_path, SERVE.replace("with torch", own + "with torch", 1), "1")
    assert (done.returncode, done.stdout.count("served")) == (0, 3)
    assert done.stderr.count("] Request 1: ") == 1
    assert "Another OverflowGuard" not in done.stderr
