"""The tripwire tells of a bad step what the full watch would have told."""

import functools

import pytest
import torch
from assembled import Assembled
from guarding import assert_same, report_from, state_of
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

INF, NAN = float("inf"), float("nan")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


TRANSIENT = []  # of the machine: what a module holds is put back for a replay


class Inner(Assembled):
    """Fails in the way that a test asks for."""

    def forward(self, x, fault):
        fault = TRANSIENT.pop() if TRANSIENT else fault
        x = self.linear(x)
        if fault == "forward":
            x = x / torch.zeros(())
        if fault == "backward":
            x = BadBackward.apply(x)
        x = self.drop(self.norm(x))
        if fault == "masked":
            x = torch.where(x > 0, x, torch.full_like(x, INF)).clamp(max=1.0)
        if fault == "buffer":
            self.total += INF
            x = x + self.total
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(
            linear=nn.Linear(4, 4),
            norm=nn.BatchNorm1d(4),
            drop=nn.Dropout(0.2),
            total=nn.Buffer(torch.zeros(4)),
        )
        self.last = nn.Linear(4, 1)

    def forward(self, x, fault=""):
        return self.last(self.inner(self.first(x), fault).relu())


def make():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def spoil(model, x, fault):
    if fault == "weight":
        with torch.no_grad():
            model.inner.linear.weight[0, 1] = NAN
    if fault == "data":
        x[2, 1] = INF
    return x


def loss_of(model, scale, arguments):
    return (model(*arguments).pow(2) * scale / scale).mean()


FAULTS = ("forward", "backward", "buffer", "weight", "data", "loss")


def run(watch, fault, policy="raise", micro_batches=1, **options):
    """Three clean steps, one with a fault, and two more; returns guard and report."""
    model, optimizer = make()
    generator = torch.Generator().manual_seed(1)
    guard = OverflowGuard(
        model, optimizer, policy, watch=watch, explain=True, **options
    )
    torch.manual_seed(2)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(micro_batches):
            x = torch.randn(6, 4, generator=generator)
            is_faulty = step == 3 and part == micro_batches - 1
            x = spoil(model, x, fault) if is_faulty else x
            scale = 0.0 if fault == "loss" and is_faulty else 1.0
            arguments = (x, fault) if is_faulty else (x,)
            guard.run(functools.partial(loss_of, model, scale, arguments)).backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            assert step == 3
            return guard, error.report, model, optimizer
    return guard, guard.last_report, model, optimizer


def facts(report):
    verdict, found = report.verdict, report.explanation
    first = verdict.first
    return (
        (first.kind, first.fqn, first.label, first.num_nan, first.num_inf),
        (
            verdict.origin.how,
            verdict.origin.maker,
            verdict.origin.source,
            verdict.dirty_gradients,
        ),
        report.frames,
        report.not_covered,
        (found.phase, found.cause, found.module, found.op and found.op.name),
        [each.code for each in found.remedies],
    )


ALL = ("activations", "grad_outputs", "gradients", "weights", "buffers", "loss")


# With two, a replay begins with the weights at the end of the step.
@pytest.mark.parametrize(
    "fault, micro_batches",
    [("forward", 1), *((fault, 1 if fault == "weight" else 2) for fault in FAULTS)],
)
@pytest.mark.explains
def test_the_report_is_that_of_the_full_watch(fault, micro_batches):
    _, wanted, *_ = run(ALL, fault, micro_batches=micro_batches)
    _, report, *_ = run("tripwire", fault, micro_batches=micro_batches)
    assert facts(report) == facts(wanted)


@pytest.mark.parametrize("fault", ["forward", "weight", "data"])
def test_the_report_of_a_step_that_raises_is_that_of_the_full_watch(fault):
    def reported(watch):
        model, optimizer = make()
        guard = OverflowGuard(model, optimizer, watch=watch, explain=True)

        def step():
            x = spoil(model, torch.ones(6, 4), fault)
            loss_of(model, 1.0, (x, fault)).backward()
            raise ValueError("own")

        with guard, pytest.raises(ValueError, match="own"):
            guard.run(step)
        return guard.last_report

    report = reported("tripwire")
    assert report.raised == "ValueError" and report.verdict.first.fqn
    assert facts(report)[0] == facts(reported(ALL))[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_skip_leaves_every_bit(fault):
    if fault == "weight":
        pytest.skip("a weight stays bad without the step")
    states = []
    for watch in (ALL, "tripwire"):
        guard, _, model, optimizer = run(watch, fault, "skip")
        assert guard.num_skipped == 1
        states.append(state_of(model, optimizer))
    assert_same(*states)


def test_no_module_has_a_hook(model, optimizer):
    with OverflowGuard(model, optimizer, watch="tripwire"):
        inner = [m for m in model.modules() if m is not model]
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in inner)


def test_what_is_masked_is_not_seen():
    assert run("tripwire", "masked")[1] is None


def test_modules_that_have_other_names_by_then_are_watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = {"watch": "tripwire", "exclude": ["2"], "allow": {"2:output": "inf"}}
    guard = OverflowGuard(model, optimizer, "warn", explain=False, **kinds)
    del model[1]  # no module is called 2 any more
    model(torch.full((3, 4), NAN)).sum().backward()
    optimizer.step()
    report = guard.last_report
    assert report is not None and report.verdict.first.label == "input[0]"
    assert guard.coverage().failures == 0


@pytest.mark.explains
def test_a_transient_fault_is_told_as_one(model, optimizer, as_kept):
    guard = OverflowGuard(model, optimizer, watch="tripwire")
    TRANSIENT.append("forward")
    guard.run(lambda: model(torch.ones(6, 4)).mean()).backward()
    report = report_from(optimizer.step)
    assert report.verdict.first.kind == "recorded"
    as_kept(report.notes)
    assert report.explanation.cause == "not reproducible"


@pytest.mark.explains
def test_without_the_loss_it_says_what_was_not_run(model, optimizer):
    with OverflowGuard(model, optimizer, watch="tripwire") as guard:
        (model(torch.ones(6, 4)).mean() * 0.0).log().sub(INF).backward()
        report = report_from(optimizer.step)
        guard.disable()
    assert "guard.run(lambda: loss)" in str(report)


def test_what_no_hook_sees_in_a_forward_is_not_called_finite(as_kept):
    """A value that the forward leaves in an attribute, and the loss adds."""

    class Net(Assembled):
        def forward(self, x):
            hidden = self.linear(x)
            self.extra = hidden[:0].mean()
            return hidden

    model = Net(linear=nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, watch="tripwire") as guard:
        loss = model(torch.ones(6, 4)).mean() + model.extra
        (loss * model.linear.weight.sum()).backward()
        report = report_from(optimizer.step)
        guard.disable()
    as_kept(" ".join(report.notes))


def a_backward(model, scale=1.0):
    (model(torch.ones(6, 4)).mean() * scale).backward()


def clip(model, *names):
    """Clips gradients, of modules of some names or all."""
    chosen = [getattr(model, name) for name in names] or [model]
    parameters = [p for module in chosen for p in module.parameters()]
    nn.utils.clip_grad_norm_(parameters, 1.0)


def another_backward(model, optimizer):
    a_backward(model, NAN)


def a_penalty(model, optimizer):
    (model.first.weight.sum() * NAN).backward()


def a_write(model, optimizer):
    with torch.no_grad():
        model.last.weight.grad.mul_(NAN)


def a_write_to_several(model, optimizer):
    torch._foreach_mul_([p.grad for p in model.first.parameters()], NAN)


def a_replacement(model, optimizer):
    model.last.bias.grad = torch.full_like(model.last.bias, INF)


def a_gradient_that_appears(model, optimizer):
    model.frozen.grad = torch.full_like(model.frozen, NAN)


def a_later_step(model, optimizer):
    optimizer.zero_grad()
    a_backward(model, NAN)


def a_later_step_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)
    a_backward(model, NAN)


def a_parameter_that_is_new(model, optimizer):
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full_like(parameter, NAN)
    optimizer.add_param_group({"params": [parameter]})


AFTER_THE_NORM = [
    *(another_backward, a_penalty, a_write, a_write_to_several, a_replacement),
    *(a_gradient_that_appears, a_later_step, a_later_step_in_place),
    a_parameter_that_is_new,
]


@pytest.mark.parametrize("spoil", AFTER_THE_NORM)
@pytest.mark.parametrize("explain", [False, "auto"])
@pytest.mark.explains
def test_a_norm_stands_for_gradients_as_they_were_when_it_was_computed(spoil, explain):
    model, optimizer = make()
    model.frozen = nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [model.frozen]})
    with OverflowGuard(
        model, optimizer, "skip", watch="tripwire", explain=explain
    ) as guard:
        a_backward(model)
        if spoil in (a_later_step, a_later_step_in_place):
            optimizer.step()  # a loop clips behind the step
        clip(model)
        spoil(model, optimizer)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    assert guard.num_skipped == 1
    assert_same(before, [p.detach() for p in model.parameters()])


def test_a_norm_holds_for_one_judgement(model, optimizer):
    """Without a second norm, the gradients are read in the next step."""
    with OverflowGuard(model, optimizer, "skip", watch="tripwire") as guard:
        a_backward(model)
        clip(model)
        optimizer.step()
        model.last.weight.grad.data.fill_(NAN)  # past the count of writes
        optimizer.step()
    assert guard.num_skipped == 1


def test_a_norm_stands_in_a_check_without_optimizers(model):
    with OverflowGuard(model, None, "warn", watch="tripwire", explain=False) as guard:
        a_backward(model)
        clip(model)
        assert guard.check() is None and guard.coverage().bytes_scanned == 4
        clip(model)
        a_backward(model, NAN)
        assert guard.check() is not None


def test_the_second_of_two_optimizers_has_its_own_gradients_read():
    models = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    with OverflowGuard(models, optimizers, "skip", watch="tripwire") as guard:
        models[1](models[0](torch.ones(2, 4))).sum().backward()
        clip(models[0])
        models[1].weight.grad.fill_(NAN)
        for optimizer in optimizers:
            optimizer.step()
    assert guard.num_skipped == 1
    assert all(bool(p.isfinite().all()) for m in models for p in m.parameters())


def test_gradients_of_no_counted_writes_are_always_scanned(model, optimizer):
    with OverflowGuard(model, optimizer, "skip", watch="tripwire") as guard:
        a_backward(model)
        with torch.inference_mode():
            model.last.bias.grad = torch.full_like(model.last.bias, NAN)
        optimizer.step()
    assert guard.num_skipped == 1
    assert guard.coverage().failures == 0


def test_a_norm_that_is_not_finite_names_the_gradients(model, optimizer):
    with OverflowGuard(model, optimizer, watch="tripwire") as guard:
        guard.run(lambda: model(torch.ones(6, 4), "backward").mean()).backward()
        clip(model)
        report = report_from(optimizer.step)
    verdict = report.verdict
    assert (verdict.first.kind, verdict.first.fqn) == ("grad_output", "inner.linear")


@pytest.mark.explains
def test_weights_that_grew_are_told_as_divergence(model, optimizer):
    with OverflowGuard(model, optimizer, watch="tripwire") as guard:
        for step in range(3):
            optimizer.zero_grad()
            if step == 2:
                with torch.no_grad():
                    model.last.weight.mul_(1e25)
            guard.run(lambda: model(torch.ones(6, 4)).pow(2).mean()).backward()
            if step < 2:
                optimizer.step()
        found = report_from(optimizer.step).explanation
    assert found.cause == "divergence"


class WithLoss(Assembled):
    """Returns its loss, which is not finite where its batch is not."""

    def forward(self, x):
        return {"loss": self.last(x).square().mean()}


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.parametrize("is_bad_in", ["evaluation", "training"])
def test_a_loss_is_of_the_forward_that_returned_it(is_bad_in, explain):
    model = WithLoss(last=nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    good, bad = torch.ones(2, 4), torch.full((2, 4), NAN)
    options = {"on_overflow": "skip", "watch": "tripwire", "explain": explain}
    with OverflowGuard(model, optimizer, **options) as guard:
        for step in range(4):
            is_bad = step == 2
            with torch.no_grad():  # such as a validation, or a generation
                model(bad if is_bad and is_bad_in == "evaluation" else good)
            optimizer.zero_grad()
            model(bad if is_bad and is_bad_in == "training" else good)[
                "loss"
            ].backward()
            optimizer.step()
    assert guard.last_report.step == 2
    assert guard.metrics()["bad_steps_total"] == 1
    is_evaluation = is_bad_in == "evaluation"
    assert guard.num_skipped == int(not is_evaluation)
    assert guard.last_report.moment == ("evaluation" if is_evaluation else "before")


@pytest.mark.parametrize("bad", [1, 4])
def test_a_skip_restores_a_model_whose_parts_alone_are_called(bad):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "skip", watch="tripwire", explain=False) as g:
        for i in range(6):
            x = torch.full((4, 2), INF) if i == bad else torch.randn(4, 2)
            before = model[1].running_var.clone()
            for part in model:  # never the model
                x = part(x)
            x.square().sum().backward()
            optimizer.step()
            assert g.last_step_skipped == (i == bad)
            assert torch.equal(model[1].running_var, before) == (i == bad)
            optimizer.zero_grad()
    assert model[1].num_batches_tracked == 5
