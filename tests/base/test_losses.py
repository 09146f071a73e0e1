"""The loss among what a model returns."""

import pytest
import torch
from torch import nn

from overflow_fast.base.losses import loss_in, model_loss_in

torch.manual_seed(0)
LAYER = nn.Linear(3, 4)
LOGITS = LAYER(torch.randn(2, 3))
LOSS = nn.functional.cross_entropy(LOGITS, torch.tensor([0, 1]))
OTHER = LAYER.weight.pow(2).mean()  # an auxiliary loss, a value, a log-determinant
TOTAL = LOSS + OTHER

RETURNED = {
    "a loss alone": (LOSS, LOSS),
    "a loss in a list": ([LOSS], LOSS),
    "a loss first": ((LOSS, LOGITS), LOSS),
    "a loss last": ((LOGITS, LOSS), LOSS),
    "a loss by name": ({"loss": OTHER, "logits": LOGITS}, OTHER),
    "a loss beside values without a graph": ((OTHER, LOGITS.detach()), OTHER),
    "a sum beside its parts": ((TOTAL, LOSS, OTHER), TOTAL),
    "another scalar last": ((LOGITS, OTHER), None),
    "another scalar first": ((OTHER, LOGITS), None),
    "another scalar in a list": ((LOGITS, [OTHER]), None),
    "two scalars": ((LOSS, OTHER), None),
    "no scalar": ((LOGITS,), None),
    "a loss without a graph": ((LOSS.detach(), LOGITS), None),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_scalar_is_the_loss_if_it_is_made_of_what_is_beside_it(name):
    returned, loss = RETURNED[name]
    if name == "a loss without a graph":
        loss = returned[0]
    assert model_loss_in(returned) is loss


def test_the_output_for_one_sample_is_no_loss():
    output = nn.Linear(3, 1)(torch.ones(1, 3))
    assert model_loss_in(output) is None
    assert model_loss_in(output.sum()) is not None


def test_a_list_that_holds_itself_is_opened_once():
    returned = [LOGITS, LOSS]
    returned.insert(0, returned)
    assert loss_in(returned) is LOSS
