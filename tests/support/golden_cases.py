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

from overflow_fast import OverflowGuard, explain
from overflow_fast.guard.report.causes import UNKNOWN
from overflow_fast.monitors import Saturation, Underflow
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
def weight_that_turned_bad_between_steps():
    model, optimizer, guard = started()
    with guard:
        trained(guard, model, optimizer, [1.0])
        with torch.no_grad():
            model[0].bias[1] = torch.inf
        trained(guard, model, optimizer, [1.0])


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
        losses = [model(torch.ones(3, 4)).sum() * torch.inf]
        losses.pop().backward()  # no line makes it again
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
