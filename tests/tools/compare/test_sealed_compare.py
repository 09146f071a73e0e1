"""Comparisons of a device without kernels with itself and with the CPU."""

import pytest
import torch
from compared_models import batch, tower
from sealed import watched

import overflow_fast

pytestmark = pytest.mark.sealed


def there(model):
    return model.to("sealed")


def test_equal_models_are_equal():
    models = there(tower()), there(tower())
    with watched() as seen:
        diff = overflow_fast.compare_live(*models, batch().to("sealed"), backward=True)
    assert diff.first is None and diff.counts()["equal"] == len(diff.rows) > 100
    assert seen.faults == 0


def test_the_layer_is_named():
    model = there(tower())
    model.blocks[1].attention.temperature = 2.0
    diff = overflow_fast.compare_live(model, there(tower()), batch().to("sealed"))
    assert diff.first.module == "blocks.1.attention"
    assert "aten.div.Tensor at " in diff.first.op


def test_half_precision_against_its_shadow():
    model = there(tower())
    half = there(tower()).to(torch.bfloat16)
    given = batch().to("sealed", torch.bfloat16)
    diff = overflow_fast.compare_live(half, model, given, backward=True)
    assert diff.first is None, diff
