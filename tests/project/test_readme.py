"""The README's Python examples, word for word, and the report that it shows."""

import pytest
import torch
from guarding import batches
from pages import Examples, assert_shown, run
from small_models import Small, loader_of, quiet, sgd, t5, trainer
from torch import nn

import overflow_fast
from overflow_fast.report.report import Cost

runs = Examples("README.md")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@runs("find-the-nan")
def test_find_the_nan(code):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    names = {"model": model, "optimizer": sgd(model), "criterion": nn.MSELoss()}
    assert run(code, **names, loader=batches(3))["guard"].step == 3
    (x, y), *_ = batches(1)
    with pytest.raises(overflow_fast.NonFiniteError, match="Step 1 is not finite"):
        run(code, **names, loader=[(x, y), (x, y * float("inf"))])


@runs("find-the-nan 2")
def test_trainer_in_short(code):
    known = run(code, trainer=trainer())
    known["trainer"].train()
    callback = known["trainer"].callback_handler.callbacks[-1]
    assert callback.guard.step == 4


@runs("find-the-nan 3")
def test_accelerate_in_short(code):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Small()
    model, optimizer = accelerator.prepare(model, sgd(model))
    known = run(code, accelerator=accelerator, model=model, optimizer=optimizer)
    accelerator.backward(model(**next(iter(loader_of(2)))).loss)
    optimizer.step()
    assert known["guard"].step == 1


@runs("find-the-nan 4")
def test_lightning_in_short(code):
    lightning = pytest.importorskip("lightning.pytorch")
    known = run(code, Trainer=quiet(lightning))
    kinds = [type(each) for each in known["trainer"].callbacks]
    assert known["GuardCallback"] in kinds


def test_the_readme_shows_a_report_of_today():
    from overflow_fast.demo.model import push_to_the_limit

    model, batch, settings = t5()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    guard = overflow_fast.OverflowGuard(model, optimizer)

    def step():
        torch.manual_seed(settings.seed)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    guard.disable()
    push_to_the_limit(model, batch, settings)
    guard.enable()
    # A share of 10 % and more, as on a busy machine, has a digit more.
    guard._loop.timer.cost = Cost(1.0, 0.033, 0.033)
    with pytest.raises(overflow_fast.NonFiniteError) as error:
        step()
    assert_shown("README.md", "Step 2", str(error.value))


def test_every_example_is_run():
    assert not runs.untested
