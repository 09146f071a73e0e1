"""What is not finite by design: rules, and learning them."""

import logging

import pytest
import torch
from guarding import INF, NAN, Net, batches, flat, make, plant, train_step
from kept_texts import errors_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


class Scores(nn.Module):
    """Returns scores with what it is told to fill in."""

    def __init__(self, fill=-INF):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fill = fill
        self.at = 0

    def forward(self, x, mask=None):
        scores = self.linear(x).clone()
        scores[:, self.at] = self.fill
        finite = scores.nan_to_num(0.0).clamp(-1e3, 1e3)
        return {"scores": scores, "probs": finite.softmax(-1)}


class Attention(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": Scores()}) for _ in range(depth)
        )
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer["attn"](x)["probs"]
        return self.out(x).mean()


def attention():
    torch.manual_seed(0)
    model = Attention()
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
    model, optimizer = attention()
    allow = {"layers.0.attn:output[scores]": "-inf"}
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
    models = {"a": attention()[0], "b": attention()[0]}
    parameters = [p for model in models.values() for p in model.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    allow = {"a.*:output[scores]": "-inf"}
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

    as_kept(
        errors_of(
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
    )


def test_a_rule_that_matches_nothing_is_reported_in_the_coverage():
    model, optimizer = attention()
    allow = {**ALLOWED, "out:output": "nan"}
    with OverflowGuard(model, optimizer, allow=allow) as guard:
        run(model, optimizer)
        assert guard.coverage().rules_unused == ["out:output"]


# Learning.


def test_rules_are_learned_from_clean_steps(caplog, as_kept):
    model, optimizer = attention()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(3)
        run(model, optimizer, 2)
        assert guard.rules == {} and not caplog.records
        run(model, optimizer, 4)
        assert guard.rules == {"layers.*.attn:output['scores']": "-inf"}
        model.layers[0]["attn"].fill = INF
        with pytest.raises(NonFiniteError):
            run(model, optimizer)
    as_kept(caplog.messages)


def test_what_was_learned_can_be_given():
    model, optimizer = attention()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(1)
        run(model, optimizer)
    with OverflowGuard(model, optimizer, allow=guard.rules):
        run(model, optimizer)


def test_rules_may_be_proposed_only(caplog, as_kept):
    model, optimizer = attention()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2, adopt=False)
        run(model, optimizer, 2)
        as_kept(caplog.messages)
        assert guard.rules == {}
        with pytest.raises(NonFiniteError):
            run(model, optimizer)


def test_names_are_widened_only_where_all_are_alike():
    model, optimizer = attention()
    model.layers[1]["attn"].fill = 0.0
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(1)
        run(model, optimizer)
    names = {f"layers.{i}.attn:output['scores']": "-inf" for i in (0, 2)}
    assert guard.rules == names


@pytest.mark.parametrize("also", [None, -INF])
def test_the_sign_is_learned(also):
    model, optimizer = attention()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        for fill in (INF, also or INF):
            for layer in model.layers:
                layer["attn"].fill = fill
            run(model, optimizer)
    kinds = "inf" if also else "+inf"
    assert guard.rules == {"layers.*.attn:output['scores']": kinds}


def test_a_nan_is_an_alarm_while_it_learns_wherever_it_is():
    model, optimizer = attention()
    model.layers[1]["attn"].fill = NAN  # which reaches nothing
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        with pytest.raises(NonFiniteError, match=r"of layers\.\d\.attn"):
            run(model, optimizer)


def test_a_loss_is_an_alarm_while_it_learns_whatever_its_gradient():
    class Infinite(nn.Linear):
        def forward(self, x):
            return {"loss": super().forward(x).mean() + INF}

    model = Infinite(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        model(torch.ones(1, 2))["loss"].backward()
        with pytest.raises(NonFiniteError, match=r"output\['loss'\]"):
            optimizer.step()


def test_where_nothing_is_to_be_learned_it_says_so(caplog, as_kept):
    model, optimizer = make()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        for batch in batches(2):
            train_step(model, optimizer, batch)
    as_kept(caplog.messages)


@pytest.mark.parametrize("value", [NAN, INF])
def test_alarms_stay_alarms_while_it_learns(value):
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip") as guard:
        guard.learn(2)
        with plant(model.blocks[0], value):  # and so the loss is bad
            train_step(model, optimizer, batches(1)[0])
        assert guard.num_skipped == 1
        for batch in batches(2):
            train_step(model, optimizer, batch)
        assert guard.rules == {}


def test_bad_gradients_are_not_learned():
    model, optimizer = make()
    with OverflowGuard(model, optimizer, "skip") as guard:
        guard.learn(1)
        with plant(model.blocks[1], INF, backward=True):
            train_step(model, optimizer, batches(1)[0])
        assert (guard.num_skipped, guard.rules) == (1, {})


def test_lagged_verdicts_are_learned_from():
    model, _ = attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        guard.learn(2)
        for _ in range(5):
            before = model.out.weight.detach().clone()
            run(model, optimizer)
            assert not before.equal(model.out.weight)
        assert guard.rules
    assert guard.num_skipped == 0


def test_nothing_is_learned_from_steps_that_a_scaler_skips():
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)

    def step(factor):
        scaler.scale(model(torch.ones(4, 8)).clamp(-1, 1).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        with plant(model[1], INF):
            for _ in range(3):
                step(INF)
        for _ in range(2):
            step(1.0)
        assert guard.rules == {}
        with pytest.raises(NonFiniteError, match=r"of 1 \(Identity\)"):
            with plant(model[1], INF):
                step(INF)


def test_a_scalar_that_a_model_returns_is_taken_for_a_loss():
    class Infinite(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean() + INF

    model = Infinite(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        model(torch.ones(1, 2)).backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()


def test_nothing_is_learned_from_evaluations():
    model, optimizer = attention()
    with OverflowGuard(model, optimizer, "warn") as guard:
        guard.learn(2)
        with torch.no_grad(), plant(model.out, INF):
            model(torch.randn(4, 8))
        assert guard.last_report is not None  # an alarm, as ever
        run(model, optimizer, 2)
        assert list(guard.rules) == ["layers.*.attn:output['scores']"]


def test_evaluations_know_what_was_seen_before():
    model, optimizer = attention()
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(2)
        run(model, optimizer)
        with torch.no_grad():
            model(torch.randn(4, 8))
        assert guard.last_report is None


def test_several_optimizers_make_one_clean_step():
    model, _ = attention()
    optimizers = [sgd(model.layers), sgd(model.out)]
    with OverflowGuard(model, optimizers) as guard:
        guard.learn(2)
        for expected in ({}, {"layers.*.attn:output['scores']": "-inf"}):
            model(torch.randn(4, 8)).backward()
            for optimizer in optimizers:
                optimizer.step()
            assert guard.rules == expected


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def test_loops_without_an_optimizer_learn_too():
    model, _ = attention()
    with OverflowGuard(model) as guard:
        guard.learn(2)
        for _ in range(2):
            model(torch.randn(4, 8)).backward()
            guard.check()
        assert guard.rules


def test_a_bad_step_does_not_reach_the_weights_while_it_learns():
    model, _ = attention()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with OverflowGuard(model, optimizer, "skip", sync="lagged", _defer=True) as guard:
        guard.learn(5)
        run(model, optimizer)
        before = model.out.weight.detach().clone()
        with plant(model.out, NAN):
            run(model, optimizer)
        assert before.equal(model.out.weight)
    assert guard.last_report.action == "skip"


def test_keys_with_a_colon_can_be_learned_and_given():
    class Tasks(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return {"task:mask": torch.full((2,), -INF), "out": out}

    model = Tasks(2, 2)
    optimizer = sgd(model)
    with OverflowGuard(model, optimizer) as guard:
        guard.learn(1)
        for _ in range(2):
            model(torch.ones(1, 2))["out"].sum().backward()
            optimizer.step()
    assert guard.rules == {":output['task:mask']": "-inf"}
    assert guard.coverage().failures == 0


def test_learning_needs_to_look_at_activations_and_gradients(as_kept):
    model, optimizer = attention()
    guard = OverflowGuard(model, optimizer, watch=["activations", "loss"])
    with pytest.raises(ValueError) as raised:
        guard.learn(2)
    as_kept(raised.value)


@pytest.mark.explains
def test_the_report_gives_the_sign_and_the_rule(as_kept):
    model, optimizer = attention()
    with OverflowGuard(model, optimizer, "warn") as guard:
        run(model, optimizer)
        rule = """allow={"layers.0.attn:output['scores']": '-inf'}"""
        assert rule in flat(guard.last_report)
        as_kept(guard.last_report.sentences())
        for layer in model.layers:
            layer["attn"].fill = torch.tensor([INF, -INF, 0.0, 1.0])
        run(model, optimizer)
        as_kept(guard.last_report.sentences())


@pytest.mark.parametrize("steps, error", [(0, ValueError), (1.5, TypeError)])
def test_a_wrong_number_of_steps_is_reported(steps, error):
    guard = OverflowGuard(Net())
    with pytest.raises(error, match="steps must be"):
        guard.learn(steps)


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
