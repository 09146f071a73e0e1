"""Runs whose whole texts are kept; those of benchmarks/answers are kept beside them.

A case is a function that is given nothing and that trains, checks or evaluates. What it
logs, raises and returns is its text.
"""

import tempfile
from pathlib import Path

import torch
from golden_text import text_of
from guarding import NAN, make, train_step
from torch import nn

from overflow_fast import (
    OverflowGuard,
    Saturation,
    Spikes,
    Underflow,
    assert_finite_state,
    explain,
)
from overflow_fast.guard.report.causes import UNKNOWN
from overflow_fast.tools.page.incidents import Incident
from overflow_fast.tools.page.render import page_of
from overflow_fast.tools.record.reading import read_record

CASES = {}
ON_RANKS = {}


def case(function):
    CASES[function.__name__] = function
    return function


def on_ranks(function):
    """A case whose function is called on each of two ranks, and returns its text."""
    ON_RANKS[function.__name__] = function
    return function


def started(**options):
    """A model of linear layers, and its guard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, OverflowGuard(model, optimizer, **options)


def trained(guard, model, optimizer, sizes, in_run=True):
    """Trains on batches of these sizes; the loss is the logarithm of a sum of exps."""
    for size in sizes:
        optimizer.zero_grad()
        x = torch.full((3, 4), 1.0)
        x[1] *= size

        def loss():
            return model(x).mul(size).exp().sum().log()  # noqa: B023

        (guard.run(loss) if in_run else loss()).backward()
        optimizer.step()


@case
def raised_with_the_loss_in_run():
    model, optimizer, guard = started()
    with guard:
        trained(guard, model, optimizer, [1.0, 2.0, 400.0])


@case
def raised_without_run():
    model, optimizer, guard = started()
    with guard:
        trained(guard, model, optimizer, [1.0, NAN], in_run=False)


@case
def raised_without_an_explanation():
    model, optimizer, guard = started(explain=False)
    with guard:
        trained(guard, model, optimizer, [1.0, 400.0])


@case
def skipped_twice():
    model, optimizer, guard = started(on_overflow="skip")
    with guard:
        trained(guard, model, optimizer, [1.0, 400.0, 400.0, 1.0])
        return guard.last_report


@case
def warned():
    model, optimizer, guard = started(on_overflow="warn")
    with guard:
        trained(guard, model, optimizer, [1.0, 400.0])
        return guard.last_report


@case
def judged_after_the_step():
    model, optimizer, guard = started(on_overflow="warn", sync="lagged")
    with guard:
        trained(guard, model, optimizer, [1.0, 400.0, 1.0])
        return guard.last_report


@case
def evaluation_of_the_model():
    model, _, guard = started()
    with guard, torch.no_grad():
        model(torch.full((3, 4), NAN))


@case
def checked_before_a_step():
    model, _, guard = started()
    with guard:
        guard.run(lambda: (model(torch.ones(3, 4)) * 0).log().mean()).backward()
        guard.check()


@case
def state_that_is_bad():
    model, optimizer, _ = started()
    with torch.no_grad():
        model[2].weight[0, 3] = NAN
    assert_finite_state(model, optimizer)


@case
def weight_that_was_bad_before():
    model, optimizer, guard = started()
    with torch.no_grad():
        model[2].weight[0, 3] = NAN
    with guard:
        trained(guard, model, optimizer, [1.0])


@case
def weight_that_turned_bad_between_steps():
    model, optimizer, guard = started()
    with guard:
        trained(guard, model, optimizer, [1.0])
        with torch.no_grad():
            model[0].bias[1] = torch.inf
        trained(guard, model, optimizer, [1.0])


@case
def buffer_that_turned_bad():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4)
    with OverflowGuard(model, optimizer) as guard:
        x[2] = 1e30
        with torch.no_grad():
            model[1].running_var[2] = torch.inf
        guard.run(lambda: model(x).mean()).backward()
        optimizer.step()


@case
def clipped_to_nan():
    model, optimizer, guard = started()
    with guard:
        guard.run(lambda: model(torch.ones(3, 4)).sum()).backward()
        model[0].weight.grad.mul_(torch.inf)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@case
def gradients_left_over():
    model, optimizer, guard = started(on_overflow="skip")
    with guard:
        trained(guard, model, optimizer, [400.0])
        guard.run(lambda: model(torch.ones(3, 4)).sum()).backward()
        optimizer.step()
        return guard.last_report


@case
def scaler_at_its_least_scale():
    model, optimizer, guard = started()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    with guard:
        loss = guard.run(lambda: (model(torch.ones(3, 4)) * 0).log().mean())
        scaler.scale(loss).backward()
        scaler.step(optimizer)


@case
def model_that_raises_at_a_nan():
    class Checked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            out = self.layer(x * 0).sub(10).log()
            if out.isnan().any():
                raise FloatingPointError("features are not finite")
            return out

    torch.manual_seed(0)
    model = Checked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        guard.run(lambda: model(torch.ones(3, 4)).mean()).backward()


@case
def many_gradients():
    model, optimizer = make()
    with OverflowGuard(model, optimizer, explain=False):
        loss = model(torch.ones(4, 8), y=torch.ones(4, 1))["loss"]
        (loss * torch.inf).backward()
        optimizer.step()


@case
def mask_that_may_be_meant():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).masked_fill(torch.eye(4).bool(), -torch.inf)

    torch.manual_seed(0)
    model = nn.Sequential(Masked())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer):
        model(torch.ones(4, 4)).mean().backward()
        optimizer.step()


@case
def draw_that_is_not_made_again():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = iter([1.0, NAN, 1.0, 1.0, 1.0, 1.0])
    with OverflowGuard(model, optimizer) as guard:
        for _ in range(2):
            guard.run(lambda: model(torch.full((3, 4), next(sizes))).mean()).backward()
            optimizer.step()


@case
def spike_of_the_loss():
    model, optimizer, guard = started(monitors=[Spikes()])
    with guard:
        for step in range(120):
            optimizer.zero_grad()
            size = 400.0 if step == 110 else 1.0 + 0.01 * (step % 7)
            x = torch.full((3, 4), 1.0)
            guard.run(lambda: model(x).pow(2).mean() * size).backward()  # noqa: B023
            optimizer.step()


@case
def small_numbers_and_large_ones():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitors = [Underflow(), Saturation()]
    with OverflowGuard(model, optimizer, monitors=monitors) as guard:
        for size in (1.0, 1e-7, 6e4, 1.0):
            optimizer.zero_grad()
            x = torch.full((3, 4), size, dtype=torch.float16)
            guard.run(lambda: model(x).float().mean()).backward()  # noqa: B023
            optimizer.step()
        return str(guard.headroom())


@case
def batch_larger_than_those_before():
    torch.manual_seed(0)
    model = nn.Linear(20, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer) as guard:
        for step in range(6):
            x = torch.rand(9, 20) * (2550 if step == 5 else 1)
            optimizer.zero_grad()
            guard.run(
                lambda: -torch.log(torch.softmax(model(x), 1)).mean()  # noqa: B023
            ).backward()
            optimizer.step()


@case
def sample_larger_than_the_others():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.rand(9, 6)
    x[4] *= 2550
    with OverflowGuard(model, optimizer) as guard:
        guard.run(lambda: -torch.log(torch.softmax(model(x), 1)).sum()).backward()
        optimizer.step()


@case
def second_logarithm_of_a_line():
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.rand(5, 6), (torch.rand(5, 4) > 0.5).float()
    with torch.no_grad():
        model.bias[1] = 60.0  # log(1 - p) is -inf, log(p) is 0

    def loss():
        p = torch.sigmoid(model(x))
        return torch.mean(torch.sum(-y * torch.log(p) - (1 - y) * torch.log(1 - p), 1))

    with OverflowGuard(model, optimizer) as guard:
        guard.run(loss).backward()
        optimizer.step()


@case
def remedy_of_several_lines():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss():
        z = model(torch.ones(3, 4)) + 200
        high = torch.log(torch.exp(z) + 1)
        return high.sum()

    with OverflowGuard(model, optimizer) as guard:
        guard.run(loss).backward()
        optimizer.step()


@case
def explained_without_a_guard():
    torch.manual_seed(0)
    return str(explain(nn.Linear(4, 2), torch.ones(3, 4), lambda y: (y * 0).log()))


@case
def page_of_an_incident_with_a_record():
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.ofr"
        model, optimizer, guard = started(on_overflow="skip", record=record)
        with guard:
            trained(guard, model, optimizer, [1.0, 2.0, 400.0])
        page = page_of([read_record(record)], [Incident.of(guard.last_report)])
    return text_of(page)


@case
def page_of_an_incident_alone():
    model, optimizer, guard = started(on_overflow="skip")
    with guard:
        trained(guard, model, optimizer, [1.0, NAN])
    return text_of(page_of([], [Incident.of(guard.last_report)]))


@case
def page_of_a_run_that_was_finite():
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "run.ofr"
        model, optimizer, guard = started(record=record)
        with guard:
            trained(guard, model, optimizer, [1.0, 2.0, 3.0])
        return text_of(page_of([read_record(record)], []))


@case
def page_of_a_cause_that_is_not_known():
    model, optimizer, guard = started(on_overflow="skip")
    with guard:
        loss = model(torch.ones(3, 4)).sum()
        (loss * torch.inf).backward()
        optimizer.step()
        report = guard.last_report
    assert report.explanation.cause == UNKNOWN.name
    return text_of(page_of([], [Incident.of(report)]))


@case
def trainer_of_transformers():
    from transformers import Trainer, TrainingArguments

    from overflow_fast.integrations.trainer import TrainerGuardCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x, labels=None):
            out = self.layer(x).exp()
            return {"loss": (out - labels).pow(2).mean(), "logits": out}

    torch.manual_seed(0)
    data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(8)]
    data[5]["x"] = torch.full((4,), -400.0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        )
        callbacks = [TrainerGuardCallback()]
        Trainer(Model(), arguments, train_dataset=data, callbacks=callbacks).train()


@on_ranks
def one_rank_of_two():
    model, optimizer, data = ranked()
    with OverflowGuard(model, optimizer):
        train_step(model, optimizer, data)


@on_ranks
def one_rank_of_two_unexplained():
    model, optimizer, data = ranked()
    with OverflowGuard(model, optimizer, explain=False):
        train_step(model, optimizer, data)


def ranked():
    """A model under DDP, its optimizer, and a batch that is bad on the last rank."""
    model = nn.parallel.DistributedDataParallel(make()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.ones(4, 8), torch.ones(4, 1)
    if torch.distributed.get_rank() == 1:
        x[2, 3] = NAN
    return model, optimizer, (x, y)
