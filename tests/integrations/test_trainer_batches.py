"""The batch of a trainer's step, in reports."""

import pytest
import torch
from guarding import INF, NAN
from lightning_fits import Lit, guard_callback, make_trainer
from torch import nn

pytestmark = [
    pytest.mark.xdist_group("lightning"),
    pytest.mark.filterwarnings("ignore"),
]

# The batch, which the trainer alone knows.


class Stages(Lit):
    """Two layers that training_step() calls one by one."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute
        self.second = nn.Linear(2, 1)

    def training_step(self, batch, index):
        return self.compute(self, batch)


def two_roots(module, batch):
    module.layer(batch["x"])
    return module.second(batch["z"]).mean()


SAMPLE = ", sample 3 of 8 (from 0)"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "compute, key, place",
    [
        (lambda m, b: m.layer(b["x"]).mean(), "x", "batch['x']"),
        (two_roots, "z", "batch['z']"),
        (lambda m, b: m.layer(b["more"][0]).mean(), "more", "batch['more'][0]"),
    ],
)
def test_the_batch_of_training_step_is_named(tmp_path, compute, key, place, value):
    verdict = verdict_of(tmp_path, compute, {key: value})
    assert verdict.origin.source == "batch"
    (found,) = verdict.origin.batch_places
    assert found.removesuffix(", which holds -inf") == f"`{place}`{SAMPLE}"


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, b: m.layer(b["x"] / 0 * 0).mean(),
        lambda m, b: m.layer(b["x"].zero_().log() * 0).mean(),
        lambda m, b: m.second(b["x"] / (m.layer(b["x"]).std() * 0) * 0).mean(),
    ],
)
def test_what_training_step_computes_is_not_the_batchs(tmp_path, compute):
    verdict = verdict_of(tmp_path, compute, {})
    assert verdict.origin.source != "batch" and verdict.origin.batch_places == []
    assert "training_step" in verdict.origin.candidates


def test_a_part_of_the_batch_that_is_gone_is_unclear(tmp_path, as_kept):
    verdict = verdict_of(
        tmp_path,
        lambda m, b: m.layer(b["x"][1:]).mean(),
        {"x": NAN},
        explain=False,  # which would keep it
    )
    assert verdict.origin.source == "unclear"
    assert verdict.origin.candidates == ["the batch", "training_step"]
    as_kept(verdict.origin.remarks)


def test_a_bad_label_is_pointed_out(tmp_path, as_kept):
    def compute(module, batch):
        return (module.layer(batch["x"]) * batch["y"]).mean()

    verdict = verdict_of(tmp_path, compute, {"y": NAN})
    assert verdict.origin.source == "loss"
    as_kept(verdict.origin.remarks)


def verdict_of(tmp_path, compute, values, **options):
    """The verdict on one batch that holds values in sample 3."""
    shapes = {"x": (8, 2), "y": (8, 1), "z": (8, 2), "more": (8, 2)}
    batch = {name: torch.ones(shape) for name, shape in shapes.items()}
    for name, value in values.items():
        batch[name][3] = value
    batch |= {"more": [batch["more"]], "ids": [1, "two", None]}
    callback = guard_callback(on_overflow="skip", **options)
    trainer = make_trainer(tmp_path, callback)
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    trainer.fit(Stages(compute), loader)
    return callback.guard.last_report.verdict


def test_batches_are_told_apart_by_the_forwards_that_follow():
    from overflow_fast.guard.watching.loop_batches import LoopBatch, LoopBatches

    tensors = [torch.full((2,), NAN), torch.ones(2)]
    bad, clean = map(LoopBatch, tensors)
    batches = LoopBatches()
    assert batches.of(0) is None
    batches.note(0, 0, bad)
    batches.note(1, 5, None)
    batches.note(1, 5, clean)
    assert batches.of(0) is bad and batches.of(1) is clean and batches.of(7) is clean
    batches.note(1, 9, bad)  # some of the calls were of the clean one
    assert batches.of(1) is None
    batches.note(1, 9, bad)
    assert batches.of(1) is None
    for number in range(20):
        batches.note(number, number, clean)
    assert len(batches._batches) <= 8


def test_a_batch_that_cannot_be_looked_at_is_unknown():
    from collections import UserDict

    from overflow_fast.guard.watching.loop_batches import LoopBatch

    x = torch.ones(2)
    assert LoopBatch({"x": x, "n": 1, "ids": torch.ones(2).long()}).bad_places() == []
    gone = LoopBatch([x * NAN])
    assert gone.bad_places() is None
    kept = UserDict(x=x * NAN)
    assert LoopBatch(kept).bad_places() == ["`batch['x']`"]
    deep = x
    for _ in range(20):
        deep = [deep]
    for unknown in (object(), x.to_sparse(), {"deep": deep}):
        assert LoopBatch([x, unknown]).bad_places() is None
    written = LoopBatch([x])
    x.fill_(NAN)
    assert written.bad_places() is None and written.place_of(x) == ""
