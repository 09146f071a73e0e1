"""The loss among what a model returns."""

import pytest
import torch
from torch import nn

from overflow_fast import OverflowGuard
from overflow_fast.scanner.tensors import model_loss_in

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


class Flow(nn.Module):
    """A flow that returns what it made of a sample, and its log-determinant."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x * torch.exp(self.scale * 50), self.scale.sum()


def test_a_replay_takes_no_other_scalar_for_the_loss():
    model = Flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, "warn")
    with guard:
        for _ in range(2):
            z, log_det = model(torch.ones(4, 2) * 1e-3)
            loss = z.pow(2).sum(1).mean() - log_det
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.scale.fill_(2.0)
    report = guard.last_report
    assert report.step == 1 and report.explanation.op.name == "aten.exp"
    assert not any(
        "is finite all the same" in note for note in report.explanation.notes
    )
    tried = [each for each in report.explanation.remedies if each.loss is not None]
    assert max(each.loss for each in tried) > 1e6  # its scalar is 4


def test_the_output_for_one_sample_is_no_loss():
    output = nn.Linear(3, 1)(torch.ones(1, 3))
    assert model_loss_in(output) is None
    assert model_loss_in(output.sum()) is not None
