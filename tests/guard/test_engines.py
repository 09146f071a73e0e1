"""Wrappers and optimizers of engines that the guard has never heard of."""

import functools
import types

import pytest
import torch
from assembled import Assembled
from ranks import on_ranks
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer.calls import names_of_inputs
from overflow_fast.explainer.remedies.patches import Float32Modules, InDtype
from overflow_fast.guard import report_of_unit
from overflow_fast.guard.optimizers.engine_gradients import engine_gradients

# Most tests ask what is stepped and skipped; some replay, under an engine as well.
Unexplained = functools.partial(OverflowGuard, explain=False)


class Wrapper(nn.Module):
    """An engine's wrapper of a model: it passes calls and state on."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)


def run(model, optimizer, num_steps=3, bad=2):
    """Trains; the last batch holds a nan. Returns the report's text, or None."""
    try:
        for step in range(num_steps):
            x = torch.ones(2, 4)
            x[0, 0] = float("nan") if step == bad else 1.0
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except NonFiniteError as error:
        return error.report
    return None


# A wrapper's attributes, whatever they are called.

NAMES = ["buffers", "parameters", "modules", "children", "named_modules"]
NAMES += ["named_parameters", "named_buffers", "named_children"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_an_attribute_may_have_the_name_of_a_method(name, policy, caplog):
    class Odd(nn.Sequential):
        pass

    inner = Odd(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    model = Wrapper(inner)
    setattr(model, name, [])
    guard = OverflowGuard(model, optimizer, policy)
    report = run(model, optimizer) or guard.last_report
    assert report.step == 2
    assert report.verdict.first.fqn == "0"
    assert "failed" not in str(report)
    assert "failed" not in caplog.text and guard.coverage().failures == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_names_are_those_of_the_model_within(depth):
    class Net(Assembled):
        def forward(self, x):
            return self.module(self.up(x) * torch.tensor(float("nan")))

    inner = Net(up=nn.Linear(4, 4), module=nn.Linear(4, 1))
    model = inner
    for _ in range(depth):
        model = Wrapper(model)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    OverflowGuard([model], optimizer, include=["up", "module"])
    with pytest.raises(NonFiniteError) as caught:
        model(torch.ones(2, 4))
        optimizer.step()
    assert caught.value.report.verdict.first.fqn == "module"


def test_a_users_model_with_one_layer_called_module_keeps_its_names():
    class Net(Assembled):
        def forward(self, x):
            return self.module(x)

    model = Net(module=nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    OverflowGuard(model, optimizer, include=["module"])
    assert run(model, optimizer).verdict.first.fqn == "module"


class Masked(nn.Module):
    def forward(self, x, mask, *others, scale=1.0):
        return x * mask * scale


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_inputs_have_the_names_of_the_model_within(depth):
    model = Masked()
    for _ in range(depth):
        model = Wrapper(model)
    assert names_of_inputs(model, 1) == ["x"]
    assert names_of_inputs(model, 3) == ["x", "mask", "input[2]"]


# Optimizers that own torch's: they scale, skip, and step copies group by group.


class EngineOptimizer:
    """Steps float32 copies of the weights, each group by a call of its own."""

    def __init__(self, model, scale=1.0):
        self.model = model
        self.weights = list(model.parameters())
        self.copies = [p.detach().clone().float() for p in self.weights]
        groups = [{"params": [each]} for each in self.copies]
        self.optimizer = torch.optim.SGD(groups, 0.1)
        self.loss_scale = scale
        self.overflow = False
        self.num_overflows = 0

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def step(self):
        self.overflow = not all(p.grad.isfinite().all() for p in self.weights)
        if self.overflow:
            self.num_overflows += 1
            self.loss_scale /= 2
            return False, None
        groups = self.optimizer.param_groups
        for weight, copy, group in zip(self.weights, self.copies, groups, strict=True):
            copy.grad = weight.grad.float() / self.loss_scale
            self.optimizer.param_groups = [group]
            self.optimizer.step()
            weight.data.copy_(copy)
        self.optimizer.param_groups = groups
        return True, sum(float(p.grad.norm()) for p in self.copies)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None


def make_engine(scale=1.0, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(dtype)
    return Wrapper(model), EngineOptimizer(model, scale)


def train(model, optimizer, num_steps=6, bad=()):
    """Trains; returns what each step returned and the weights behind it."""
    results = []
    for step in range(num_steps):
        dtype = optimizer.weights[0].dtype
        x = torch.full((3, 4), 1.0 + step / 8, dtype=dtype)
        x[0, 0] = float("nan") if step in bad else 1.0
        optimizer.backward(model(x).float().square().mean())
        stepped = optimizer.step()
        optimizer.zero_grad()
        results.append((stepped, [p.detach().clone() for p in optimizer.weights]))
    return results


@pytest.mark.explains
def test_groups_are_one_step_and_a_bad_one_is_charged_to_itself(caplog, as_kept):
    model, optimizer = make_engine()
    guard = Unexplained(model, optimizer, "skip")
    results = train(model, optimizer, bad=[3])
    assert (guard.step, guard.num_skipped, guard.last_report.step) == (6, 1, 3)
    before, at, after = (results[i][1] for i in (2, 3, 4))
    assert all(map(torch.equal, before, at))
    assert not all(map(torch.equal, at, after))
    assert results[3][0] == (False, None)  # what the loop unpacks
    assert optimizer.overflow is False  # of the last step
    assert optimizer.num_overflows == 0  # the engine was not asked
    as_kept(caplog.messages)
    train(model, optimizer, num_steps=1, bad=[0])
    assert optimizer.overflow is True


@pytest.mark.parametrize("policy", ["warn", "skip", "raise"])
def test_a_state_that_overflows_in_an_engine_is_of_its_step_and_stays(policy):
    """What an engine has done cannot be undone: a skip is none, and raises."""
    model, optimizer = make_engine()
    groups = optimizer.optimizer.param_groups
    optimizer.optimizer = torch.optim.Adam([{"params": g["params"]} for g in groups])
    guard = Unexplained(model, optimizer, policy)
    train(model, optimizer, num_steps=2)
    optimizer.backward(1e25 * model(torch.ones(3, 4)).square().mean())
    if policy == "warn":
        optimizer.step()
    else:
        with pytest.raises(NonFiniteError):
            optimizer.step()
    report = guard.last_report
    assert report.step == 2 and report.verdict.origin.source == "update"
    assert report.is_beyond_repair and "load a checkpoint" in str(report).lower()
    assert report.action == ("warn" if policy == "warn" else "raise")


def test_a_state_of_an_engine_that_was_bad_before_is_not_of_this_step():
    model, optimizer = make_engine()
    groups = optimizer.optimizer.param_groups
    optimizer.optimizer = torch.optim.Adam([{"params": g["params"]} for g in groups])
    train(model, optimizer, num_steps=1)
    state = optimizer.optimizer.state[optimizer.copies[0]]
    state["exp_avg_sq"].fill_(float("inf"))
    guard = Unexplained(model, optimizer)
    optimizer.backward(1e25 * model(torch.ones(3, 4)).square().mean())
    optimizer.step()
    assert guard.last_report is None


def test_a_healthy_run_is_the_same_bit_for_bit_and_silent(caplog):
    (bare, own), (model, optimizer) = make_engine(), make_engine()
    expected = train(bare, own)
    caplog.clear()
    Unexplained(model, optimizer)
    for (a, before), (b, after) in zip(expected, train(model, optimizer), strict=True):
        assert a == b and all(map(torch.equal, before, after))
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
@pytest.mark.parametrize("name", ["loss_scale", "cur_scale", "loss_scaler", "tensor"])
def test_a_scale_that_searches_is_no_alarm(name, options):
    class Searching(EngineOptimizer):
        pass

    model, optimizer = make_engine(2.0**23, torch.float16)
    if name != "loss_scale":
        holder = type("Scaler", (), {"min_scale": 1.0})()
        key = "cur_scale" if name == "loss_scaler" else "scale"
        wrapped = torch.tensor if name == "tensor" else float
        get = lambda self: float(getattr(holder, key))  # noqa: E731
        put = lambda self, value: setattr(holder, key, wrapped(value))  # noqa: E731
        scale = optimizer.__dict__.pop("loss_scale")
        Searching.loss_scale = property(get, put)
        optimizer.__class__ = Searching
        optimizer.loss_scale = scale
        optimizer.loss_scaler = holder
    guard = Unexplained(model, optimizer, **options)
    train(model, optimizer, num_steps=12)
    assert optimizer.num_overflows > 2
    assert guard.step == 12
    assert guard.last_report is None


def test_an_overflow_of_the_forward_is_an_alarm_under_a_scale():
    model, optimizer = make_engine(2.0**4, torch.float16)
    guard = Unexplained(model, optimizer, "skip")
    train(model, optimizer, bad=[2])
    assert (guard.num_skipped, guard.last_report.step) == (1, 2)
    assert optimizer.loss_scale == 2.0**4  # the engine's scale is not touched


@pytest.mark.parametrize(
    "scale, attribute", [(1.0, None), (256.0, "dynamic"), (256.0, "loss_scale_config")]
)
def test_gradients_are_an_alarm_where_no_scale_can_be_lowered(scale, attribute):
    model, optimizer = make_engine(scale)
    if attribute == "dynamic":
        optimizer.dynamic = False
    elif attribute is not None:  # what the optimizer has itself says less
        config = {"cur_scale": scale, "dynamic_loss_scale": False}
        optimizer.loss_scale_config = types.SimpleNamespace(**config)
    guard = Unexplained(model, optimizer, "skip")
    handle = optimizer.weights[0].register_hook(lambda g: g * float("inf"))
    train(model, optimizer, num_steps=1)
    handle.remove()
    assert guard.last_report.step == 0
    train(model, optimizer, num_steps=1)
    assert guard.num_skipped == 1


@pytest.mark.parametrize("result", ["known", "learned", "first"])
def test_a_skipped_step_returns_what_the_caller_unpacks(result):
    class Known(EngineOptimizer):
        skipped_step_result = (False, "told", None)

    model, optimizer = make_engine()
    optimizer.__class__ = Known if result == "known" else EngineOptimizer
    Unexplained(model, optimizer, "skip")
    bad = 0 if result == "first" else 2
    stepped = train(model, optimizer, num_steps=3, bad=[bad])[bad][0]
    expected = {"known": (False, "told", None), "learned": (False, None)}
    assert stepped == expected.get(result)


def test_a_megatron_optimizer_returns_three_values_from_the_first_step_on():
    class MegatronOptimizer(EngineOptimizer):
        pass

    model, optimizer = make_engine()
    optimizer.__class__ = type("Chained", (MegatronOptimizer,), {})
    Unexplained(model, optimizer, "skip")
    assert train(model, optimizer, 1, bad=[0])[0][0] == (False, None, None)


class DeepSpeedEngine(Wrapper):
    """Steps torch's optimizer and asks it for `overflow`, as DeepSpeed's does."""

    def __init__(self, module, optimizer):
        super().__init__(module)
        self.optimizer = optimizer
        self.skipped = []

    def step(self):
        self.optimizer.step()
        self.skipped.append(getattr(self.optimizer, "overflow", False))
        self.optimizer.zero_grad()


class Wrapped:
    """Looks at `overflow` if the optimizer has it at first: so does Accelerate."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.scaler = None
        self.__has_overflow__ = hasattr(optimizer, "overflow")

    def step(self):
        pass


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_engine_learns_that_a_plain_optimizer_was_skipped(is_wrapped, policy):
    model = nn.Linear(4, 1)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    engine = DeepSpeedEngine(model, plain)
    optimizer = Wrapped(plain) if is_wrapped else plain
    before = set(vars(plain))
    guard = OverflowGuard(engine, optimizer, policy)
    for step in range(4):
        x = torch.ones(2, 4) * (float("nan") if step == 2 else 1.0)
        engine(x).sum().backward()
        try:
            engine.step()
        except NonFiniteError:
            plain.zero_grad()
        if is_wrapped:
            assert optimizer.__has_overflow__
    bad = [True] if policy == "skip" else []
    assert engine.skipped == [False, False, *bad, False]
    guard.remove()
    assert set(vars(plain)) == before
    assert not is_wrapped or not optimizer.__has_overflow__


def test_a_plain_optimizer_without_an_engine_has_no_overflow():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Unexplained(model, optimizer, "skip")
    run(model, optimizer)
    assert not hasattr(optimizer, "overflow")


def test_a_tripwire_sees_the_gradients_that_megatron_keeps():
    class Main(EngineOptimizer):
        def backward(self, loss):
            super().backward(loss)
            for weight in self.weights:
                weight.main_grad, weight.grad = weight.grad, None

        def step(self):
            for weight in self.weights:
                weight.grad = weight.main_grad
            return super().step()

    model, optimizer = make_engine()
    optimizer.__class__ = Main
    guard = Unexplained(model, optimizer, "skip", watch="tripwire")
    train(model, optimizer, bad=[2])
    assert (guard.num_skipped, guard.last_report.step) == (1, 2)


def test_what_fills_a_partition_up_is_no_gradient():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    names = {id(each): f"w{i}" for i, each in enumerate(weights[:2])}
    gradients = {0: [torch.full((2,), float(i)) for i in range(4)]}
    layer = types.SimpleNamespace(
        params_in_partition=[weights], averaged_gradients=gradients
    )
    found, gradients = engine_gradients([layer], names)
    assert found == ["w0", "w1", "averaged_gradients[0][2]"]
    assert [float(each[0]) for each in gradients] == [0.0, 1.0, 2.0]


def test_a_tripwire_that_saw_nothing_says_so_in_that_step(caplog, as_kept):
    class Hidden(EngineOptimizer):
        def backward(self, loss):
            super().backward(loss)
            self.own = [weight.grad for weight in self.weights]
            EngineOptimizer.zero_grad(self)

        def step(self):
            for weight, own in zip(self.weights, self.own, strict=True):
                weight.grad = own
            return super().step()

    model, optimizer = make_engine()
    optimizer.__class__ = Hidden
    guard = Unexplained(model, optimizer, watch="tripwire")
    guard.record(loss=torch.ones(()))
    train(model, optimizer, num_steps=1)
    assert "was not checked" not in caplog.text
    train(model, optimizer, num_steps=3)
    said = [each for each in caplog.messages if "was not checked" in each]
    assert len(said) == 1
    as_kept(said[0])


@pytest.mark.explains
def test_a_report_that_fails_keeps_its_verdict(monkeypatch, caplog, as_kept):
    def fail(watches):
        raise ValueError("broken")

    monkeypatch.setattr(report_of_unit, "least_headroom", fail)
    model, optimizer = make_engine()
    guard = Unexplained(model, optimizer, "skip")
    train(model, optimizer, bad=[2])
    assert guard.num_skipped == 1
    as_kept(str(guard.last_report).replace("\n  ", " "))
    as_kept(caplog.messages)


@pytest.mark.explains
def test_a_backward_is_not_run_again_into_an_engines_gradients(as_kept):
    class Adding(EngineOptimizer):
        def backward(self, loss):
            super().backward(loss)
            for weight in self.weights:
                weight.main_grad = weight.grad.clone()

    model, optimizer = make_engine()
    optimizer.__class__ = Adding
    counts = []
    guard = OverflowGuard(model, optimizer, "skip")
    optimizer.weights[0].register_hook(lambda g: counts.append(1) or g * float("nan"))
    train(model, optimizer, num_steps=1)
    assert len(counts) == 1
    as_kept(guard.last_report.explanation)


# Remedies that are tried must leave an engine's hooks where they are.


class Reducing(Wrapper):
    """Adds gradients to its own, by hooks on accumulators: so do DDP and Megatron."""

    def __init__(self, module):
        super().__init__(module)
        self.sums = {each: 0 for each in module.parameters()}
        self.kept = []
        for parameter in self.sums:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(lambda *_, p=parameter: self.add(p))
            self.kept.append(node)

    def add(self, parameter):
        self.sums[parameter] += 1


def a_rank_with_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).half()
    errors = []
    wrapped = Reducing(model)
    for patch in (InDtype(torch.bfloat16), Float32Modules("", ("1",))):
        try:
            with patch.applied({"": model}):
                pass
        except RuntimeError as error:
            errors.append(str(error))
    wrapped(torch.ones(2, 4).half()).sum().backward()
    return list(wrapped.sums.values()), errors


@pytest.mark.slow
def test_remedies_leave_hooks_on_gradients():
    ((sums, errors),) = on_ranks(1, a_rank_with_hooks)
    assert sums == [1, 1, 1, 1]
    assert errors == ["other code may have hooks on the weights' gradients"] * 2


def test_remedies_cast_weights_that_nobody_has_hooks_on():
    model = nn.Linear(4, 4).half()
    with InDtype(torch.bfloat16).applied({"": model}):
        assert model.weight.dtype == torch.bfloat16
    assert model.weight.dtype == torch.float16


# Engines whose attributes have names that no engine's have.


class Hiding(nn.Module):
    """Is the model's wrapper, and hides its optimizer, its scale and its skips."""

    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.weights = list(self.net.parameters())
        self.buffers = [1.0, None]
        self._sgd = torch.optim.SGD(self.weights, 0.1)
        self._multiplier, self._patience = scale, [0]

    def forward(self, x):
        return self.net(x)

    def backward(self, loss):
        (loss * self._multiplier).backward()

    def step(self):
        gradients = [weight.grad for weight in self.weights]
        if not all(each.isfinite().all() for each in gradients):
            self._multiplier /= 2
            return False, None
        for each in gradients:
            each.div_(self._multiplier)
        self._sgd.step()
        return True, sum(float(each.norm()) for each in gradients)

    def zero_grad(self, set_to_none=True):
        self._sgd.zero_grad()


class Splitting(Hiding):
    """Steps each weight by an optimizer of its own, some of them twice."""

    def __init__(self, scale=1.0):
        super().__init__(scale)
        del self._sgd
        self.parts = {
            str(i): torch.optim.SGD([w], 0.1) for i, w in enumerate(self.weights)
        }

    def step(self):
        for number, part in enumerate(self.parts.values()):
            part.step()
            if number % 2:
                part.step()
        return True, float(len(self.parts))

    def zero_grad(self, set_to_none=True):
        for part in self.parts.values():
            part.zero_grad()


def run_hidden(make, policy, bad=3, rank=0, **options):
    """Trains; returns the guard, what steps returned, and whether weights moved."""
    engine = make()
    guard = OverflowGuard(engine, engine, policy, **options)
    results, moved = [], []
    for step in range(6):
        x = torch.full((3, 4), 1.0 + step / 8)
        x[0, 0] = float("nan") if (step, rank) == (bad, 0) else 1.0
        before = [weight.detach().clone() for weight in engine.weights]
        engine.backward(engine(x).square().mean())
        try:
            is_updated, norm = engine.step()
            results.append((is_updated, norm is not None))
        except NonFiniteError as error:
            results.append(error.report.step)
        engine.zero_grad()
        moved.append(not all(map(torch.equal, before, engine.weights)))
    return guard, results, moved


@pytest.mark.parametrize("make", [Hiding, Splitting])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_an_engine_may_hide_what_it_holds(make, policy, caplog):
    guard, results, moved = run_hidden(make, policy)
    assert (guard.step, guard.last_report.step) == (6, 3)
    assert guard.last_report.verdict.first.fqn == "net.0"
    assert moved == [step != 3 for step in range(6)]
    made = (True, True)
    bad = 3 if policy == "raise" else (False, False)
    assert results == [made, made, made, bad, made, made]
    assert not [gap for gap in guard.coverage().gaps() if "failed" in gap]


def hidden_on_ranks(make):
    rank = torch.distributed.get_rank()
    group = torch.distributed.group.WORLD
    guard, results, moved = run_hidden(make, "skip", rank=rank, process_group=group)
    return guard.last_report.step, results, moved


@pytest.mark.slow
@pytest.mark.parametrize("make", [Hiding, Splitting])
def test_the_ranks_of_such_an_engine_stay_together(make):
    first, second = on_ranks(2, hidden_on_ranks, make)
    assert first == second
    assert first[0] == 3 and first[2] == [step != 3 for step in range(6)]


def a_model_whose_engine_has_the_group():
    rank = torch.distributed.get_rank()
    model, optimizer = make_engine()
    optimizer.data_parallel_group = torch.distributed.group.WORLD
    guard = OverflowGuard(model.module, optimizer, "skip")
    train(model, optimizer, bad=[3] if rank == 1 else [])
    return guard.num_skipped, guard.last_report.step, str(guard.last_report.where)


def test_the_groups_of_an_engines_optimizer_are_those_of_its_ranks():
    first, second = on_ranks(2, a_model_whose_engine_has_the_group)
    assert first == second
    assert first[:2] == (1, 3)


@pytest.mark.parametrize("scale, is_half", [(2.0**23, True), (1e30, False)])
def test_a_report_says_that_a_scale_is_not_known(scale, is_half, as_kept):
    engine = Hiding(scale)
    dtype = torch.float16 if is_half else torch.float32
    engine.net.to(dtype)
    guard = OverflowGuard(engine, engine, "skip", explain=False)
    engine.weights[-1].register_hook(lambda gradient: gradient * 1e30)
    engine.backward(engine(torch.ones(3, 4, dtype=dtype)).square().mean())
    engine.step()
    as_kept(guard.last_report.sentences())
