"""Who is who: roles of entries, names of modules, identities of tensors."""

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN
from torch import nn

from overflow_fast import (
    DebugUnderflowOverflow,
    NonFiniteError,
    OverflowGuard,
    assert_finite_state,
    keep_in_fp32,
)
from overflow_fast.integrations.trainer_support import GuardOwner
from overflow_fast.options import Schedule


class OddlyNamed(nn.Module):
    """A model whose parameters and modules are named as the entries of calls are."""

    NAMES = ("input", "output", "weight", "grad_output", "loss")

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.register_parameter(name, nn.Parameter(torch.ones(2)))
        self.register_parameter("input[0]", nn.Parameter(torch.ones(2)))

    def forward(self, x):
        return (x * sum(self.parameters(recurse=False))).sum()


def bad_at(name):
    model = OddlyNamed()
    with torch.no_grad():
        dict(model.named_parameters())[name][0] = NAN
    return model


def first_of(model, form=lambda model: model, **options):
    with OverflowGuard(model, None, "warn", **options) as guard:
        form(model)(torch.ones(2)).backward()
        return guard.check().verdict


def compiled(model):
    return torch.compile(model, backend="aot_eager")


# Compiled, all of them are listed by one frame: the place of one tells of all.
@pytest.mark.parametrize(
    "name, form",
    [
        *((name, lambda model: model) for name in [*OddlyNamed.NAMES, "input[0]"]),
        *((name, compiled) for name in ("output", "input[0]")),
    ],
)
def test_a_parameter_is_a_weight_whatever_its_name(name, form, fresh_compiler):
    verdict = first_of(bad_at(name), form)
    first = verdict.first
    assert (first.kind, first.fqn, first.label) == ("weight", name, name)
    assert verdict.origin.how == "given"
    assert verdict.masks == verdict.allowed == []


@pytest.mark.parametrize("name", OddlyNamed.NAMES)
def test_a_rule_is_for_a_role(name):
    allow = {f":{name if name in ('input', 'output') else 'output'}": "nan"}
    assert first_of(bad_at(name), allow=allow).first.kind == "weight"
    allow = {f":weight.{name}": "nan"}
    assert first_of(bad_at(name), allow=allow).first.label == "output"


def test_a_weights_headroom_is_not_an_inputs():
    model = OddlyNamed()
    with OverflowGuard(model, None, "warn") as guard:
        model(torch.ones(2))
        guard.check()
        listed = {row.where for row in guard.headroom().rows}
    assert {f"{name} of the model" for name in OddlyNamed.NAMES} <= listed


@pytest.mark.parametrize("name", ["input", "output", "weight", "loss", "grad_output"])
def test_what_is_recorded_is_recorded_whatever_its_name(name):
    with OverflowGuard(nn.Linear(2, 1), None, "warn") as guard:
        guard.record(**{name: torch.tensor(INF)})
        assert guard.check().verdict.first.kind == "recorded"


@pytest.mark.parametrize("name", ["input", "output"])
def test_buffers_and_gradients_keep_their_role(name):
    model = nn.Module()
    model.register_parameter(name, nn.Parameter(torch.ones(2)))
    getattr(model, name).grad = torch.full((2,), NAN)
    with OverflowGuard(model, None, "warn") as guard:
        assert guard.check().verdict.first.kind == "gradient"
    model = nn.Module()
    model.register_buffer(name, torch.full((2,), NAN))
    with OverflowGuard(model, None, "warn") as guard:
        assert guard.check().verdict.first.kind == "buffer"


@pytest.mark.slow
def test_the_role_of_a_weight_survives_many_labels():
    class Keys(Assembled):
        def forward(self, x):
            self.calls += 1
            return {f"{self.calls} {i}": x for i in range(70_000 * (self.calls == 1))}

    model = Keys(fc=nn.Linear(2, 1), calls=0)
    with OverflowGuard(model, None, "warn") as guard:
        model(torch.ones(1))
        guard.discard()
        with torch.no_grad():
            model.fc.weight[0] = NAN
        model.fc(torch.ones(1, 2))
        first = guard.check().verdict.first
    assert (first.kind, first.fqn) == ("weight", "fc.weight")


def test_the_original_report_lists_such_parameters_as_they_are(capsys):
    model = bad_at("output")
    detector = DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="inf/nan detected"):
        model(torch.ones(2))
    detector.remove()
    assert "output has nans" in capsys.readouterr().out


# Names of modules after the model has changed.


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Wrapped(Assembled):
    """What an adapter puts around a layer."""

    def forward(self, x):
        return self.base_layer(x) + self.lora(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(2, 2))
        self.b = nn.Linear(2, 2)
        self.c = Times(1.0)
        self.d = nn.Linear(2, 2)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


def insert(model):
    model.a.append(nn.ReLU())
    return "c"


def wrap(model):
    model.c = nn.Sequential(nn.Identity(), model.c)
    return "c.1"


def adapt(model):
    model.b = Wrapped(base_layer=model.b, lora=nn.Linear(2, 2))
    model.b.lora = Times(1.0)
    return "b.lora"


def replace(model):
    model.c = Times(1.0)
    return "c"


def delete(model):
    model.a = nn.Identity()
    return "c"


def share(model):
    model.a.insert(0, model.d)
    return "c"


def swap(model):
    model.b, model.c = model.c, model.b
    return "b"


def cycle_every(guard, model, optimizer):
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def cycle_by_hand(guard, model, optimizer):
    guard.disable()
    guard.enable()


CYCLES = [(cycle_every, {"schedule": 2}), (cycle_by_hand, {})]


@pytest.mark.parametrize("cycle, options", CYCLES)
@pytest.mark.parametrize(
    "change",
    [insert, wrap, adapt, replace, delete, share, swap],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_names_follow_the_model(change, cycle, options):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OverflowGuard(model, optimizer, "warn", **options) as guard:
        expected = change(model)
        cycle(guard, model, optimizer)
        module = model.get_submodule(expected)
        module.factor = INF
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        verdict = guard.last_report.verdict
        coverage = guard.coverage()
    assert (verdict.first.fqn, verdict.first.class_name) == (expected, "Times")
    assert (verdict.origin.how, verdict.origin.maker) == ("made", expected)
    count = len(list(model.modules()))
    assert (coverage.modules, coverage.modules_watched) == (count, count)
    assert not any("left out" in gap for gap in coverage.gaps())


def test_coverage_counts_modules_that_came_since():
    model = nn.Sequential(nn.Linear(2, 2))
    with OverflowGuard(model, None, "warn") as guard:
        model.append(nn.Linear(2, 2))
        coverage = guard.coverage()
    assert (coverage.modules, coverage.modules_watched) == (3, 2)


def test_rules_follow_the_names():
    model = Stack()
    with OverflowGuard(model, None, "warn", allow={"*c*:output": "inf"}) as guard:
        wrap(model)
        guard.disable()
        guard.enable()
        model.c[1].factor = INF
        model(torch.ones(1, 2))
        assert guard.check().verdict.first.fqn == "d"


def test_what_a_wrapper_passes_on_is_not_the_batch():
    model = Stack()
    with OverflowGuard(model, None, "warn") as guard:
        model.b = Wrapped(base_layer=model.b, lora=nn.Linear(2, 2))
        guard.disable()
        guard.enable()
        model.b.lora.forward = lambda x: x
        model.b.forward = lambda x: model.b.base_layer(x.abs() * INF)
        model(torch.ones(1, 2))
        verdict = guard.check().verdict
    assert verdict.first.fqn == "b.base_layer"
    assert (verdict.origin.how, verdict.origin.source) == ("passed_on", "caller")
    assert verdict.origin.maker.startswith("b,")


def test_headroom_stays_with_its_module():
    model = Stack()
    with OverflowGuard(model, None, "warn") as guard:
        model.c.factor = 1000.0
        model(torch.ones(1, 2))
        guard.check()
        insert(model)
        guard.disable()
        guard.enable()
        big = [row for row in guard.headroom().rows if row.where == "output of c"]
    assert len(big) == 1
    assert big[0].abs_max > 10


# Patterns of names.


def pair():
    return {"gen": nn.Sequential(nn.Linear(2, 2)), "disc": nn.Sequential(Times(INF))}


@pytest.mark.parametrize(
    "options, is_found",
    [
        ({"include": ["gen.*"]}, False),
        ({"include": ["disc.0"]}, True),
        ({"include": ["disc"]}, True),
        ({"exclude": ["disc*"]}, False),
        ({"exclude": ["gen.*"]}, True),
        ({"allow": {"disc*:*": "inf"}}, False),
        ({"include": (name for name in ("disc.*",))}, True),
        ({"exclude": (name for name in ("disc*",))}, False),
        ({"exclude": {"disc*": 1}.keys()}, False),
    ],
)
def test_patterns_are_of_the_names_in_reports(options, is_found):
    models = pair()
    with OverflowGuard(models, None, "warn", **options) as guard:
        models["disc"](models["gen"](torch.ones(1, 2)))
        assert (guard.check() is not None) == is_found


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_without_its_models_name(argument, as_kept):
    as_kept.error(ValueError, OverflowGuard, pair(), **{argument: ["0"]})


def test_models_of_a_list_have_numbers():
    models = list(pair().values())
    with OverflowGuard(models, None, "warn", include=["1.0"]) as guard:
        models[1](models[0](torch.ones(1, 2)))
        assert guard.check().verdict.first.fqn == "1.0"


# Generators.


def test_arguments_may_be_generators():
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    told = []
    guard = OverflowGuard(
        (model for model in models),
        (optimizer for optimizer in optimizers),
        "warn",
        watch=(name for name in ("activations", "weights", "loss")),
        include=(name for name in ("0", "1")),
        exclude=(name for name in ()),
        schedule=Schedule(every=2),
        allow={"1:output": (kind for kind in ("nan", "inf"))},
        metrics=(exporter for exporter in (lambda *each: told.append(each),)),
    )
    with guard:
        models[1](models[0](torch.full((1, 2), INF))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert guard.last_report.verdict.first.label == "input[0]"
    assert guard.rules == {"1:output": ["inf", "nan"]}
    assert [step for step, _ in told] == [0]
    guard.self_test((torch.ones(1, 2),), layers=(name for name in ("0",)))


def test_state_may_be_given_by_generators():
    models = [nn.Linear(2, 1)]
    models[0].weight.data[0, 0] = NAN
    optimizers = [torch.optim.SGD(models[0].parameters())]
    with pytest.raises(NonFiniteError, match="the weight `weight`"):
        assert_finite_state((m for m in models), (o for o in optimizers))


def test_names_to_keep_in_float32_may_be_a_generator():
    model = nn.Sequential(nn.Linear(2, 2))
    assert keep_in_fp32(model, (name for name in ("0",))).names == ["0"]


def test_each_training_has_all_of_a_generator():
    owner = GuardOwner(
        on_overflow="warn",
        watch=(name for name in ("weights",)),
        include=(name for name in ("0",)),
    )
    for _ in range(2):
        model = nn.Sequential(nn.Linear(2, 1))
        guard = owner.attach_guard(model, None)
        assert guard.coverage().not_watched
        model[0].weight.data[0, 0] = NAN
        assert guard.check().verdict.first.fqn == "0.weight"
    owner.remove_guard()


# Weights that turn bad, and the addresses of those that are gone.


def by_data(model):
    model[1].weight.data[0, 0] = NAN


def by_another_tensor(model):
    model[1].weight.data = torch.full_like(model[1].weight, NAN)


def by_load_state_dict(model):
    state = model.state_dict()
    state["1.weight"] = torch.full_like(model[1].weight, NAN)
    model.load_state_dict(state)


def by_numpy(model):
    model[1].weight.detach().numpy()[0, 0] = NAN


def by_swap(model):
    other = nn.Parameter(torch.full_like(model[1].weight, NAN))
    torch.utils.swap_tensors(model[1].weight, other)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


WAYS = [by_data, by_another_tensor, by_load_state_dict, by_numpy, by_swap]


@pytest.mark.parametrize(
    "change", WAYS, ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize("is_rooted", [True, False])
def test_weights_that_turn_bad_between_evaluations(change, is_rooted):
    model = two_layers().eval()
    call = model if is_rooted else (lambda x: model[1](model[0](x)))
    with OverflowGuard(model, None, "warn") as guard, torch.no_grad():
        call(torch.randn(2, 4))
        assert guard.last_report is None
        change(model)
        call(torch.randn(2, 4))
        verdict = guard.last_report.verdict
    assert (verdict.first.kind, verdict.first.fqn) == ("weight", "1.weight")
    assert verdict.origin.how == "given"


@pytest.mark.parametrize(
    "change", WAYS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_weights_that_turn_bad_around_an_evaluation(change):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.randn(2, 4))
            change(model)
            model(torch.randn(2, 4))
        assert guard.last_report.verdict.first.fqn == "1.weight"
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        first = guard.last_report.verdict.first
    assert (first.kind, first.fqn) == ("weight", "1.weight")


def test_weights_are_scanned_once_in_a_step_all_the_same():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with OverflowGuard(model, optimizer, "warn", watch=["weights"]) as guard:
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert guard.coverage().tensors_scanned == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_freed_weights_address_is_not_the_next_ones(mode):
    model = nn.Linear(64, 64, bias=False)
    found = []
    with OverflowGuard(model, None, "warn") as guard, mode():
        for i in range(20):
            weight = torch.randn(64, 64)
            if i % 2:
                weight[0, 0] = NAN
            x = torch.randn(2, 64)
            torch.func.functional_call(model, {"weight": weight}, (x,))
            del weight
            if mode is torch.no_grad:
                report = guard.last_report
            elif i % 2:
                report = guard.check()
            if i % 2:
                found.append(report.verdict.first.kind)
    assert found == ["weight"] * 10


def in_a_list():
    class Own(Assembled):
        def forward(self, x):
            return x * self.ps[0] * self.ps[1]

    model = Own(ps=nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)]))
    return model, model.ps[1], "ps.1"


def in_a_dict():
    class Own(Assembled):
        def forward(self, x):
            return x * self.ps["output"]

    model = Own(ps=nn.ParameterDict({"output": nn.Parameter(torch.ones(4))}))
    return model, model.ps["output"], "ps.output"


@pytest.mark.parametrize("make", [in_a_list, in_a_dict])
def test_weights_that_stand_elsewhere(make):
    model, weight, name = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        weight.view(-1)[0] = NAN
    with OverflowGuard(model, optimizer, "warn") as guard:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        verdict = guard.last_report.verdict
    assert verdict.first.kind == "weight"
    assert verdict.first.fqn.endswith(name)
    assert verdict.origin.how == "given"


def test_modules_named_input_and_output():
    model = nn.ModuleDict({"input": nn.Linear(2, 2), "output": Times(INF)})
    model.forward = lambda x: model["output"](model["input"](x))
    with OverflowGuard(model, None, "warn") as guard:
        model(torch.ones(1, 2))
        verdict = guard.check().verdict
    assert (verdict.first.fqn, verdict.first.label) == ("output", "output")
    assert (verdict.origin.how, verdict.origin.maker) == ("made", "output")
