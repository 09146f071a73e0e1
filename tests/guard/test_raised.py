"""Steps that the program's own code raises out of, at what a nan or an inf led to."""

import json
import logging
import sys
import traceback
from pathlib import Path

import pytest
import torch
from assembled import Assembled
from guarding import assert_same, state_of
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from overflow_fast import NonFiniteError, OverflowGuard, read_record

BAD_STEP = 2
pytestmark = pytest.mark.usefixtures("validated")


class Net(nn.Module):
    """A model whose head may raise; a row of 3e38 makes its second layer overflow."""

    def __init__(self, head=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ELU(), nn.Linear(8, 4))
        nn.init.normal_(self.body[0].weight)
        self.norm = nn.LayerNorm(4)
        self.head = head

    def forward(self, x):
        out = self.norm(self.body(x))
        return out if self.head is None else self.head(out)


def cholesky(h):
    return torch.linalg.cholesky(h.T @ h + torch.eye(4)).diagonal().log().sum()


def eigenvalues(h):
    return torch.linalg.eigvalsh(h.T @ h).sum()


def inverse(h):
    if not torch.isfinite(h).all():
        raise ZeroDivisionError("singular")
    return torch.linalg.inv(h.T @ h + torch.eye(4)).sum()


def svd(h):
    return torch.linalg.svd(h.T @ h + torch.eye(4)).S.sum()


def own_check(h):
    if not torch.isfinite(h).all():
        raise FloatingPointError("features are not finite, stopping")
    return h.pow(2).mean()


def own_assert(h):
    assert not h.isnan().any(), "nan"
    return h.pow(2).mean()


def multinomial(h):
    torch.multinomial(h.softmax(1), 1)
    return h.pow(2).mean()


def index_of_a_nan(h):
    return h[:, h.detach().mean().abs().clamp(max=3).to(torch.int64)].mean()


def number_of_a_nan(h):
    int(h.detach().sum())  # as for a tokenizer, or a name
    return h.pow(2).mean()


def normal(h):
    return -Normal(h, 1.0).log_prob(torch.zeros(4)).mean()


def categorical(h):
    return -Categorical(logits=h).log_prob(torch.zeros(len(h))).mean()


HEADS = [
    *(cholesky, eigenvalues, inverse, svd, own_check, own_assert, multinomial),
    *(index_of_a_nan, number_of_a_nan, normal, categorical),
]


def batches(count=4):
    torch.manual_seed(1)
    data = [torch.randn(8, 6) for _ in range(count)]
    data[BAD_STEP][5] = 3e38 * Net().body[0].weight[0].sign().detach()
    return data


def trained(head, where, policy="raise", optimizer=torch.optim.SGD, **arguments):
    """Trains until the head raises; returns the guard and the exception."""
    model = Net(head if where == "forward" else None)
    optimizer = optimizer(model.parameters(), lr=1e-3)
    guard = OverflowGuard(model, optimizer, policy, **arguments)
    error = None
    try:
        for x in batches():
            if where == "run":
                loss = guard.run(lambda x=x: head(model(x)))
            else:
                loss = model(x) if where == "forward" else head(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as raised:
        error = raised
        if where == "loop":  # what Python does with what nobody catches
            sys.excepthook(type(raised), raised, raised.__traceback__)
    guard.remove()
    return guard, error


def assert_reported(guard, error, step=BAD_STEP):
    report = guard.last_report
    assert not isinstance(error, NonFiniteError)
    assert report is not None and report.step == step
    assert report.moment == "raised"
    assert report.raised == type(error).__qualname__
    assert report.verdict.first.fqn == "body.0"
    if sys.version_info >= (3, 11):
        assert [each for each in error.__notes__ if report.headline() in each]
        assert len(error.__notes__) == 1
    return report


# The lines of a loop are read and run again, whatever raises: each head in a loop. A
# forward and `guard.run` call it as it is.
@pytest.mark.parametrize(
    "head, where",
    [
        *((head, "loop") for head in HEADS),
        *((head, "forward") for head in HEADS[::3]),
        *((head, "run") for head in HEADS[1::3]),
    ],
)
@pytest.mark.explains
def test_a_step_that_raises_is_reported_with_its_first_bad_value(head, where):
    guard, error = trained(head, where)
    report = assert_reported(guard, error)
    explanation = report.explanation
    assert explanation.op.name == "aten.addmm"
    assert explanation.cause == "range overflow"
    assert explanation.sample == 5


# Other places than the forward and its loss.


class Refuses(torch.autograd.Function):
    """Raises in backward at a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not gradient.isfinite().all():
            raise ArithmeticError("gradient is not finite")
        return gradient


class Squares(nn.Module):
    """A model whose gradient overflows where its output does not."""

    def __init__(self, refuses=False):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.refuses = nn.Linear(6, 4), refuses
        self.act = nn.Tanh()

    def forward(self, x):
        out = self.fc(Refuses.apply(x) if self.refuses else x)
        return self.act(Refuses.apply(out) if self.refuses else out)


def root(out, x):
    """A loss with an infinite derivative for a batch of zeros, and a finite value."""
    return (out - out.detach()).sqrt().mean() if x.eq(0).all() else out.exp().mean()


def refusing_hook(gradient):
    if not gradient.isfinite().all():
        raise LookupError("hook")


def by_anomaly(model, optimizer, x):
    with torch.autograd.detect_anomaly():
        root(model(x), x).backward()


def by_function(model, optimizer, x):
    model.refuses = True
    root(model(x), x).backward()


def by_hook(model, optimizer, x):
    if model.fc.weight._backward_hooks is None:
        model.fc.weight.register_hook(refusing_hook)
    root(model(x), x).backward()


def by_clipping(model, optimizer, x):
    root(model(x), x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def by_assert_on_gradients(model, optimizer, x):
    root(model(x), x).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def by_closure(model, optimizer, x):
    def closure():
        loss = root(model(x), x)
        loss.backward()
        if model.fc.weight.grad.isnan().any():
            raise OSError("closure")
        return loss

    optimizer.step(closure)


def by_logged_number(model, optimizer, x):
    loss = root(model(x), x)
    loss.backward()
    int(model.fc.weight.grad.sum())


def by_step_hook(model, optimizer, x):
    root(model(x), x).backward()
    optimizer.register_step_pre_hook(refusing_step)


def refusing_step(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        assert all(p.grad.isfinite().all() for p in group["params"]), "before it"


IN_BACKWARD = [
    *(by_anomaly, by_function, by_hook, by_clipping, by_assert_on_gradients),
    *(by_closure, by_logged_number, by_step_hook),
]


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("step", IN_BACKWARD)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_raises_in_or_behind_backward_is_reported(step, policy):
    model = Squares()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    error = None
    try:
        with OverflowGuard(model, optimizer, policy) as guard:
            for i in range(4):
                x = torch.zeros(8, 6) if i == BAD_STEP else torch.randn(8, 6)
                step(model, optimizer, x)
                if step is not by_closure:
                    optimizer.step()
                optimizer.zero_grad()
    except Exception as raised:
        error = raised
    report = guard.last_report
    assert not isinstance(error, NonFiniteError)
    assert report is not None and report.step == BAD_STEP, error
    assert report.raised == type(error).__qualname__
    assert report.verdict.first.kind in ("grad_output", "gradient")
    assert guard.metrics()["bad_steps_total"] == 1


# What is left alone, and what a step begins with behind one that was left.


def caught(model, optimizer, guard, data, run):
    """Trains by steps, of which those that raise are given up."""
    errors = []
    for i, x in enumerate(data):
        try:
            loss = guard.run(lambda i=i, x=x: run(i, x)) if guard else run(i, x)
        except Exception as error:
            errors.append(error)
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return errors


def with_buffers(head=None):
    model = Net(head)
    model.norm = nn.BatchNorm1d(4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("where", ["forward", "run"])
def test_a_skip_lets_the_next_step_begin_as_if_the_one_had_not_been(where, caplog):
    model, optimizer = with_buffers(own_check if where == "forward" else None)
    guard = OverflowGuard(model, optimizer, "skip")
    with caplog.at_level(logging.WARNING, "overflow_fast"):
        errors = caught(
            *(model, optimizer, None if where == "forward" else guard, batches()),
            lambda i, x: model(x) if where == "forward" else own_check(model(x)),
        )
    alone, its_optimizer = with_buffers(own_check)
    data = [x for i, x in enumerate(batches()) if i != BAD_STEP]
    caught(alone, its_optimizer, None, data, lambda i, x: alone(x))
    assert_same(state_of(model, optimizer), state_of(alone, its_optimizer))
    (error,) = errors
    assert_reported(guard, error)
    assert guard.num_skipped == 0 and not guard.last_step_skipped
    assert any("Step " in each.message for each in caplog.records)
    guard.remove()


@pytest.mark.parametrize("where", ["forward", "run", "loop"])
def test_an_exception_of_a_finite_step_gets_no_report(where, caplog):
    def head(h):
        raise KeyError("column")

    with caplog.at_level(logging.WARNING, "overflow_fast"):
        guard, error = trained(head, where, "skip")
    assert guard.last_report is None and type(error) is KeyError
    assert not getattr(error, "__notes__", None)
    assert not caplog.records


@pytest.mark.explains
def test_a_finite_step_that_was_given_up_leaves_nothing_to_the_next_one():
    model, optimizer = with_buffers()
    guard = OverflowGuard(model, optimizer, explain=True)

    def run(i, x):
        out = model(x)
        if i == 1:
            raise KeyError("row")
        return own_check(out) if i < 2 else out.sum().log() * out.mean()

    with pytest.raises(NonFiniteError) as raised:
        caught(model, optimizer, guard, batches(), run)
    report = raised.value.report
    assert report.step == 1 and report.moment == "before"
    assert report.explanation.op.name == "aten.addmm"
    guard.remove()


def test_an_exception_that_the_function_catches_itself_ends_no_step():
    model, optimizer = with_buffers()
    guard = OverflowGuard(model, optimizer, "skip")

    def run(i, x):
        try:
            return own_check(model(x))
        except FloatingPointError:
            return model(torch.ones(8, 6)).mean()

    assert not caught(model, optimizer, guard, batches(), run)
    assert guard.last_report.moment == "before"  # the step was judged as others are
    guard.remove()


@pytest.mark.explains
@pytest.mark.parametrize("explain", [True, False])
@pytest.mark.parametrize("policy", ["skip", "warn"])
def test_left_over_gradients_are_no_finding_of_the_step_that_raises(policy, explain):
    model, optimizer = with_buffers()
    guard = OverflowGuard(model, optimizer, policy, explain=explain)
    model(batches()[BAD_STEP]).mean().backward()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()  # and nobody clears the gradients
    first = guard.last_report
    if policy == "skip":
        model(torch.ones(8, 6))
    error = KeyError("column")
    sys.excepthook(KeyError, error, None)
    assert guard.last_report is first and not getattr(error, "__notes__", None)
    optimizer.zero_grad()  # others in their place are a finding
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(KeyError):
        guard.run(lambda: model(torch.ones(8, 6)) if {}["column"] else None)
    assert guard.last_report is not first
    guard.remove()


@pytest.mark.parametrize("where", ["step", "raised", "request"])
def test_a_weight_that_was_bad_before_is_beyond_repair_wherever_it_is_found(where):
    model, optimizer = with_buffers()
    with torch.no_grad():
        model.body[0].weight[0, 0] = torch.nan
    optimizers = None if where == "request" else optimizer
    with OverflowGuard(model, optimizers, "warn", explain=False) as guard:
        if where == "request":
            with torch.no_grad():
                model(torch.ones(8, 6))
        elif where == "step":
            model(torch.ones(8, 6)).mean().backward()
            optimizer.step()
        else:
            with pytest.raises(FloatingPointError):
                guard.run(lambda: own_check(model(torch.ones(8, 6))))
        report = guard.last_report
    assert report.verdict.first.kind == "weight" and report.is_beyond_repair


def test_interruptions_and_errors_of_guards_are_left_alone():
    model, optimizer = with_buffers()
    with OverflowGuard(model, optimizer, "skip") as guard:
        for error in (KeyboardInterrupt(), SystemExit(1)):
            model(batches()[BAD_STEP])
            sys.excepthook(type(error), error, None)
            assert guard.last_report is None
            assert not getattr(error, "__notes__", None)


def test_a_hook_that_other_code_has_set_since_stays(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: seen.append(error))
    model, optimizer = with_buffers()
    guard = OverflowGuard(model, optimizer)
    inner = sys.excepthook
    others = lambda *error: inner(*error)  # noqa: E731
    sys.excepthook = others
    model(batches()[BAD_STEP])
    error = ValueError("nan")
    sys.excepthook(ValueError, error, None)
    assert guard.last_report.raised == "ValueError" and len(seen) == 1
    guard.remove()
    assert sys.excepthook is others
    sys.excepthook(ValueError, error, None)
    assert len(seen) == 2


@pytest.mark.parametrize("policy", ["raise", "warn", "skip", "callable"])
@pytest.mark.explains
def test_every_policy_gets_the_report_once(policy, tmp_path):
    asked, log = [], tmp_path / "guard.jsonl"
    own = (lambda report: asked.append(report.raised) or "skip", "callable")
    guard, error = trained(
        normal, "run", own[0] if policy == "callable" else policy, log=log, explain=True
    )
    report = assert_reported(guard, error)
    assert report.action == "raise"  # an exception ends the step, whoever raised it
    assert asked == ([""] if policy == "callable" else [])
    lines = [json.loads(each) for each in log.read_text().splitlines()]
    bad = [each for each in lines if each.get("is_clean") is False]
    assert [(each["step"], each["action"]) for each in bad] == [(BAD_STEP, "raise")]


def test_a_policy_that_fails_leaves_the_exception_the_programs(caplog):
    def policy(report):
        raise LookupError("of the policy")

    guard, error = trained(normal, "run", policy)
    assert_reported(guard, error)
    assert "of the policy" in caplog.text


def test_evidence_and_record_have_the_step(tmp_path):
    arguments = {"evidence": tmp_path / "evidence", "record": tmp_path / "run.ofr"}
    guard, error = trained(cholesky, "forward", **arguments)
    report = assert_reported(guard, error)
    folder = Path(report.evidence)
    assert (folder / "report.json").is_file()
    assert json.loads((folder / "report.json").read_text())["raised"] == report.raised
    steps = list(read_record(arguments["record"]).steps)
    assert steps[-1].first == BAD_STEP and steps[-1].actions == {"raise": 1}


@pytest.mark.explains
def test_check_says_what_came_before_an_exception_that_was_caught():
    model, optimizer = with_buffers()
    guard = OverflowGuard(model, optimizer)
    with pytest.raises(ValueError, match="constraint"):
        normal(model(batches()[BAD_STEP]))
    with pytest.raises(NonFiniteError) as raised:
        guard.check()  # as in the next cell of a notebook
    explanation = raised.value.report.explanation
    assert explanation.op.name == "aten.addmm"
    assert not any("captured" in note for note in explanation.notes)
    guard.remove()


class Bare(ValueError):
    add_note = property()  # as in Python 3.10


class Frozen(ValueError):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Fails(ValueError):
    def add_note(self, text):
        raise OSError("full")


@pytest.mark.explains
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("kind", [Bare, Frozen, Fails])
def test_where_notes_cannot_be_added_the_log_has_the_report(kind, policy, caplog):
    def head(h):
        if not h.isfinite().all():
            raise kind
        return h.mean()

    guard, error = trained(head, "run", policy)
    assert type(error) is kind and guard.last_report.raised == kind.__name__
    (text,) = [each.message for each in caplog.records if "Step " in each.message]
    assert "cause     range overflow" in text
    assert guard.coverage().failures == 0


@pytest.mark.explains
def test_an_error_of_a_replay_takes_no_frame_from_the_programs_own():
    errors = [ValueError("y is nan")]

    class Net(Assembled):
        def forward(self, x):
            y = torch.log(x.mean(1, keepdim=True)) + self.a(x)
            if y.isnan().any():
                raise errors.pop() if errors else KeyError("another in a replay")
            return y

    model = Net(a=nn.Linear(6, 1))
    guard = OverflowGuard(model, torch.optim.SGD(model.parameters(), 0.1), "skip")
    with pytest.raises(ValueError) as raised:
        guard.run(lambda: model(-torch.ones(2, 6)).mean())
    guard.remove()
    frames = [each.name for each in traceback.extract_tb(raised.value.__traceback__)]
    assert frames[-1] == "forward" and not errors


def test_the_traceback_of_the_program_is_as_without_a_guard():
    def lines(error):
        frames = traceback.extract_tb(error.__traceback__)
        names = [each.name for each in frames if "overflow_fast/" not in each.filename]
        return [name for name in names if name != "inner"]  # torch's, around hooks

    _, error = trained(own_check, "forward")
    model = Net(own_check)
    with pytest.raises(FloatingPointError) as bare:
        model(batches()[BAD_STEP])
    assert lines(error)[-3:] == lines(bare.value)[-3:]


# Evaluations, compiled code.


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_an_evaluation_that_raises_is_reported(policy):
    model = Net(multinomial).eval()
    guard = OverflowGuard(model, None, policy)
    with pytest.raises(RuntimeError, match="probability") as raised, torch.no_grad():
        model(batches()[BAD_STEP])
    assert_reported(guard, raised.value, step=0)
    guard.remove()


def test_a_metric_that_raises_behind_an_evaluation_leaves_its_report():
    model, error = Net(), ValueError("Input contains NaN.")
    with OverflowGuard(model, on_overflow="warn") as guard:
        with torch.no_grad():
            model(batches()[BAD_STEP])
        sys.excepthook(ValueError, error, None)
    assert guard.last_report.verdict.first.fqn == "body.0"


def test_a_generation_that_raises_is_reported():
    hf = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=16, **sizes)).eval()
    model.transformer.h[1].mlp.c_fc.bias.data[0] = 3e38
    model.transformer.h[1].mlp.c_proj.weight.data[0] = 3e38
    ids = torch.ones(1, 4, dtype=torch.long)
    with OverflowGuard(model, on_overflow="warn") as guard:
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(ids, do_sample=True, max_new_tokens=4, pad_token_id=0)
    assert guard.last_report.verdict.first.fqn.startswith("transformer.h.1")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["run", "forward"])
def test_compiled_models_are_reported(where):
    model = Net()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inner = torch.compile(cholesky, backend="aot_eager") if where == "run" else None
    error = None
    try:
        with OverflowGuard(model, optimizer, "skip") as guard:
            for x in batches():
                loss = inner(compiled(x)) if inner else cholesky(compiled(x))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except Exception as raised:
        error = raised
    assert_reported(guard, error)


class Checked(torch.optim.SGD):
    """An optimizer that checks what it has written."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for each in group["params"]:
                each.div_(0 if group["lr"] == 0 else 1)
                assert each.isfinite().all(), "weights"
        return loss


def test_an_optimizer_that_raises_at_its_own_update_is_reported():
    model = Squares()
    optimizer = Checked(model.parameters(), lr=1e-2)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for i in range(3):
            model(torch.ones(2, 6)).mean().backward()
            optimizer.param_groups[0]["lr"] = 0 if i == BAD_STEP else 1e-2
            if i == BAD_STEP:
                with pytest.raises(AssertionError) as raised:
                    optimizer.step()
            else:
                optimizer.step()
        report = guard.last_report
    assert report.step == BAD_STEP and report.raised == "AssertionError"
    assert report.verdict.origin.source == "update"
    assert report.verdict.first.kind == "weight"
    assert not isinstance(raised.value, NonFiniteError)


def test_hooks_that_torch_has_yet_to_call_do_not_see_those_of_a_replay():
    """torch walks through the model's hooks while the step is judged."""
    model = Net(own_check)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer, "skip") as guard:
        model.register_forward_hook(lambda *_: None, always_call=True)
        with pytest.raises(FloatingPointError, match="stopping") as raised:
            model(batches()[BAD_STEP])
        assert_reported(guard, raised.value, step=0)


def test_gradients_that_a_scaler_handles_are_no_finding():
    model, optimizer = with_buffers()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with OverflowGuard(model, optimizer, "skip") as guard:
        for scale in (1.0, 1e38):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 6)).mean() * scale).backward()
            if scale == 1.0:
                scaler.step(optimizer)
                scaler.update()
        assert any(p.grad.isinf().any() for p in model.parameters())
        error = KeyError("column")
        sys.excepthook(KeyError, error, None)
        assert guard.last_report is None and not getattr(error, "__notes__", None)


HOW_COMPUTED_AGAIN = ["early stop", "to its end", "reentrant", "within guard.run"]


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("how", HOW_COMPUTED_AGAIN)
def test_what_backward_leaves_early_raises_nothing_of_the_program(how, policy):
    models = {"a": with_buffers()[0], "b": with_buffers()[0]}
    both = nn.ModuleDict(models)
    optimizer = torch.optim.SGD(both.parameters(), lr=1e-3)
    with OverflowGuard(models, optimizer, policy, explain=False) as guard:

        def called(model, x):
            return (
                guard.run(lambda: model(x)) if how == "within guard.run" else model(x)
            )

        for factor in (1.0, float("nan"), 1.0):
            before = state_of(both, optimizer)
            x = torch.randn(8, 6).mul_(factor).requires_grad_()
            with set_checkpoint_early_stop(how != "to its end"):
                for model in models.values():
                    is_reentrant = how == "reentrant"
                    out = checkpoint(called, model, x, use_reentrant=is_reentrant)
                    out.mean().backward()
            is_bad = factor != factor
            if is_bad and policy == "raise":
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
            if is_bad:
                report = guard.last_report
                assert report.moment == "before" and report.action == policy
                assert_same(state_of(both, optimizer), before)
        assert guard.metrics()["bad_steps_total"] == 1


def test_an_exception_that_ends_a_backward_is_judged_behind_it():
    model, optimizer = with_buffers()
    with OverflowGuard(model, optimizer, "skip", explain=False) as guard:

        def stop(gradient):
            raise ValueError("own")

        def step():
            out = checkpoint(model, torch.full((8, 6), torch.nan), use_reentrant=False)
            out.register_hook(stop)
            out.mean().backward()

        with pytest.raises(ValueError, match="own") as raised:
            guard.run(step)
        assert_reported(guard, raised.value, step=0)
