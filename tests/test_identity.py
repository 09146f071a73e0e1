"""Who is who: roles of entries, names of modules, identities of tensors."""

import pytest
import torch
from guarding import INF, NAN
from torch import nn

from overflow_fast import DebugUnderflowOverflow, OverflowGuard


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


FORMS = {
    "eager": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*OddlyNamed.NAMES, "input[0]"])
def test_a_parameter_is_a_weight_whatever_its_name(name, form, fresh_compiler):
    verdict = first_of(bad_at(name), FORMS[form])
    first = verdict.first
    assert (first.kind, first.fqn, first.label) == ("weight", name, name)
    assert verdict.origin == "given"
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


def test_the_role_of_a_weight_survives_many_labels():
    class Keys(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 1)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return {f"{self.calls} {i}": x for i in range(70_000 * (self.calls == 1))}

    model = Keys()
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
