"""Several steps: which one the first difference is in, and what lies before it."""

import pytest
import torch

import overflow_fast


def model_of(*layers):
    torch.manual_seed(0)
    layers = layers or (torch.nn.Linear(16, 16), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))


def x_of(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step))


@pytest.fixture
def compared(tmp_path):
    def record(name, optimizer, model, change, steps, num):
        optimizer = optimizer(model.parameters())
        folder = tmp_path / name
        with overflow_fast.recording(folder, model, steps=steps) as run:
            for step in range(num):
                if step:
                    run.step()
                optimizer.zero_grad()
                (model(x_of(step)).square().sum() * change(step)).backward()
                optimizer.step()

    def compare(mine, its, *models, change=lambda step: 1.0, steps=None, num=3):
        mine_model, its_model = models or (model_of(), model_of())
        record("a", mine, mine_model, change, steps, num)
        record("b", its, its_model, lambda step: 1.0, steps, num)
        return overflow_fast.compare(tmp_path / "a", tmp_path / "b")

    return compare


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, 1e-2, **options)


def sgd(lr=0.01, **options):
    return lambda parameters: torch.optim.SGD(parameters, lr, **options)


UPDATES = {
    "beta2": (adamw(betas=(0.9, 0.95)), adamw(), 2),
    "beta1": (adamw(betas=(0.5, 0.999)), adamw(), 2),
    "weight decay": (adamw(weight_decay=0.5), adamw(), 1),
    "learning rate": (sgd(0.02), sgd(), 1),
    "momentum": (sgd(momentum=0.9), sgd(), 2),
    "another optimizer": (sgd(), adamw(), 1),
}


@pytest.mark.parametrize(
    "name, is_first",
    [*((name, True) for name in UPDATES), ("another optimizer", False)],
)
def test_an_update_is_named_with_its_step(compared, name, is_first, as_kept):
    mine, its, step = UPDATES[name]
    diff = compared(*((mine, its) if is_first else (its, mine)))
    assert (diff.first.kind, diff.first.row.step) == ("update", step), diff
    assert diff.first.row.place.role == "parameter"
    as_kept(diff.first, [each for each in str(diff).splitlines() if each[:4] == "Step"])


def test_equal_runs_of_several_steps_say_nothing(compared, as_kept):
    diff = compared(adamw(), adamw())
    assert diff.first is None and diff.said == []
    as_kept(diff.said, diff.verdict())


def test_a_later_loss_is_in_its_step(compared, as_kept):
    diff = compared(sgd(), sgd(), change=lambda step: 2.0 if step == 1 else 1.0)
    assert (diff.first.kind, diff.first.row.step) == ("loss", 1)
    as_kept(diff.first)


def test_steps_between_that_were_not_recorded_leave_it_open(compared, as_kept):
    diff = compared(sgd(0.02), sgd(), steps=[0, 2])
    assert (diff.first.kind, diff.first.row.step) == ("weights", 2)
    as_kept(str(diff.first))


def test_a_buffer_is_no_update(compared, as_kept):
    norms = (torch.nn.BatchNorm1d(16, momentum=each) for each in (0.1, 0.2))
    diff = compared(sgd(), sgd(), *map(model_of, norms))
    assert (diff.first.kind, diff.first.row.place.role) == ("weights", "buffer"), diff
    as_kept(diff.first)


def test_what_all_steps_have_is_said_once(compared, as_kept):
    diff = compared(sgd(), sgd(), model_of(torch.nn.Dropout(0.0)), model_of())
    said = [each for each in diff.said if "run alone" in each]
    assert 1 <= len(said) <= 2
    as_kept(said[0])
