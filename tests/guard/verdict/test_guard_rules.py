"""What is not finite by design: rules that allow it."""

import logging

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, batches, flat, make, plant, train_step
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


class Scores(Assembled):
    """Returns scores with what it is told to fill in."""

    def forward(self, x, mask=None):
        scores = self.linear(x).clone()
        scores[:, self.at] = self.fill
        finite = scores.nan_to_num(0.0).clamp(-1e3, 1e3)
        return {"scores": scores, "probs": finite.softmax(-1)}


class Attention(nn.Module):
    def __init__(self, fill=-INF, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": Scores(linear=nn.Linear(8, 8), fill=fill, at=0)})
            for _ in range(depth)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer["attn"](x)["probs"]
        return self.out(x).mean()


def attention(fill=-INF):
    torch.manual_seed(0)
    model = Attention(fill)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def run(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


ALLOWED = {"layers.*.attn:output[scores]": "-inf"}


@pytest.mark.parametrize(
    "allow",
    [
        ALLOWED,
        {"*.attn:output['scores']": "-inf"},
        {'*attn:output["scores"]': ["-inf"]},
        {"*:output.sc*": "inf"},
        {"*:*": ["-inf", "nan"]},
        {"layers.0.attn:output*": "-inf", "layers.[12].attn:out?ut.scores": "-inf"},
    ],
)
@pytest.mark.parametrize("options", [{}, {"_defer": True}], ids=["cpu", "deferred"])
def test_what_is_allowed_is_no_alarm(allow, options):
    model, optimizer = attention()
    with OverflowGuard(model, optimizer, allow=allow, **options) as guard:
        run(model, optimizer, 3)
    assert guard.rules == {
        text: kinds
        if isinstance(kinds, str)
        else kinds[0]
        if len(kinds) == 1
        else kinds
        for text, kinds in allow.items()
    }


@pytest.mark.parametrize("fill", [INF, NAN])
def test_other_values_are_an_alarm(fill):
    model, optimizer = attention()
    model.layers[1]["attn"].fill = fill
    with OverflowGuard(model, optimizer, allow=ALLOWED) as guard:
        with pytest.raises(NonFiniteError, match=r"of layers\.1\.attn"):
            run(model, optimizer)
    assert guard.last_report.verdict.origin.how == "made"


def test_both_signs_at_once_are_an_alarm_where_one_is_allowed():
    model, optimizer = attention()
    with OverflowGuard(model, optimizer, allow=ALLOWED):
        with plant(model.layers[0]["attn"].linear, INF):
            with pytest.raises(NonFiniteError, match=r"of layers\.0\.attn\.linear"):
                run(model, optimizer)


def test_other_places_are_an_alarm():
    model, optimizer = attention(INF)
    allow = {"layers.0.attn:output[scores]": "inf"}
    with OverflowGuard(model, optimizer, allow=allow):
        with pytest.raises(NonFiniteError, match=r"of layers\.1\.attn"):
            run(model, optimizer)


def test_what_is_allowed_is_named_with_what_is_not():
    model, optimizer = attention()
    with OverflowGuard(model, optimizer, "warn", allow=ALLOWED) as guard:
        with plant(model.out, NAN):
            run(model, optimizer)
    assert guard.last_report.verdict.origin.maker == "out"
    assert guard.last_report.verdict.num_bad_frames > 1


@pytest.mark.parametrize("kind", ["weight", "gradient", "optimizer_state", "buffer"])
def test_tensors_that_stand_in_no_call_have_names_too(kind):
    model, optimizer = make()
    train_step(model, optimizer, batches(1)[0])
    layer = model.blocks[1].fc1
    name = {"optimizer_state": "weight.exp_avg_sq", "buffer": "running_var"}
    where = "norm" if kind == "buffer" else "blocks.1.fc1"
    rule = f"{where}:{kind}.{name.get(kind, 'weight')}"
    watch = ["gradients", "weights", "buffers", "optimizer_state"]
    with OverflowGuard(model, optimizer, watch=watch, allow={rule: "+inf"}) as guard:
        if kind == "weight":
            layer.weight.data[0, 0] = INF
        elif kind == "optimizer_state":
            optimizer.state[layer.weight]["exp_avg_sq"][0, 0] = INF
        elif kind == "buffer":
            model.norm.running_var[0] = INF
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        if kind == "gradient":
            layer.weight.grad[0, 0] = INF
        optimizer.step()
        assert guard.coverage().rules_unused == []
        if kind == "gradient":
            layer.weight.grad[0, 0] = -INF
            with pytest.raises(NonFiniteError, match=r"blocks\.1\.fc1\.weight"):
                optimizer.step()


def test_a_recorded_tensor_has_a_name():
    model, optimizer = make()
    with OverflowGuard(model, optimizer, allow={":recorded.logs": "-inf"}) as guard:
        guard.record(logs=torch.tensor([0.0, -INF]))
        guard.check()
        guard.record(other=torch.tensor([0.0, -INF]))
        with pytest.raises(NonFiniteError, match="recorded `other`"):
            guard.check()


def test_masks_in_buffers_need_no_rule():
    model, optimizer = make()
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    with OverflowGuard(model, optimizer) as guard:
        train_step(model, optimizer, batches(1)[0])
        model.mask[0] = INF
        with pytest.raises(NonFiniteError, match="buffer `mask`"):
            guard.check()


def test_rules_are_of_each_models_own_names():
    models = {"a": attention(INF)[0], "b": attention(INF)[0]}
    parameters = [p for model in models.values() for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    allow = {"a.*:output[scores]": "inf"}
    with OverflowGuard(models, optimizer, allow=allow):
        run(models["a"], optimizer)
        with pytest.raises(NonFiniteError, match=r"of b\.layers\.0\.attn"):
            run(models["b"], optimizer)


def test_a_fused_optimizer_steps_where_what_its_kernels_see_is_allowed():
    model, _ = attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    options = {"sync": "lagged", "_defer": True}
    for allow, steps in ((ALLOWED, True), ({"out:output": "-inf"}, False)):
        before = model.out.weight.detach().clone()
        with OverflowGuard(model, optimizer, "skip", allow=allow, **options):
            run(model, optimizer)
        assert before.equal(model.out.weight) != steps
    # A nan is no inf, for the device either.
    model.layers[1]["attn"].fill = NAN
    before = model.out.weight.detach().clone()
    with OverflowGuard(model, optimizer, "skip", allow=ALLOWED, **options):
        run(model, optimizer)
    assert before.equal(model.out.weight)


@pytest.mark.slow
def test_rules_hold_in_compiled_code():
    model, optimizer = attention()
    compiled = torch.compile(model, backend="aot_eager")
    with OverflowGuard(compiled, optimizer, allow=ALLOWED):
        run(compiled, optimizer, 2)
        model.layers[2]["attn"].fill = INF
        with pytest.raises(NonFiniteError, match=r"of layers\.2\.attn"):
            run(compiled, optimizer)


def test_wrong_rules_are_reported(as_kept):
    def call(allow):
        OverflowGuard(attention()[0], allow=allow)

    as_kept.errors(
        call,
        [
            ["*:output"],
            {"attn": "-inf"},
            {3: "-inf"},
            {"*:scores": "-inf"},
            {"*:inputs.x": "-inf"},
            {"*:output": "minus inf"},
            {"*:output": []},
            {"*:output": None},
            {"*.atn:output": "-inf"},
        ],
    )


def test_a_rule_that_matches_nothing_is_reported_in_the_coverage():
    model, optimizer = attention()
    allow = {**ALLOWED, "out:output": "nan"}
    with OverflowGuard(model, optimizer, allow=allow) as guard:
        run(model, optimizer)
        assert guard.coverage().rules_unused == ["out:output"]


@pytest.mark.explains
def test_the_report_gives_the_sign_and_the_rule(as_kept):
    model, optimizer = attention()
    for layer in model.layers:
        layer["attn"].at = slice(None)
    with OverflowGuard(model, optimizer, "warn") as guard:
        run(model, optimizer)
        rule = """allow={"layers.0.attn:output['scores']": '-inf'}"""
        assert rule in flat(guard.last_report)
        as_kept(guard.last_report.sentences())
        for layer in model.layers:
            layer["attn"].fill = torch.tensor([[INF], [-INF], [0.0], [1.0]])
        run(model, optimizer)
        as_kept(guard.last_report.sentences())


@pytest.fixture(autouse=True)
def warnings(caplog):
    caplog.set_level(logging.WARNING, "overflow_fast")


@pytest.mark.explains
def test_what_is_allowed_is_said_where_it_did_harm(as_kept):
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    model[0].weight.data[:] = 3e38
    allow = {"0:output": "inf", "1:input[0]": "inf", ":input*": "inf"}
    for explain in (False, True):
        arguments = {"allow": allow, "explain": explain}
        with OverflowGuard(model, on_overflow="warn", **arguments) as guard:
            model(torch.full((1, 2), 3.0))
            report = guard.check()
        assert report.verdict.origin.maker == "1"
        as_kept(report.sentences())
