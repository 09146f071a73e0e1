"""Under several ranks the tripwire has all of them look at a bad step again."""

import pytest
import ranks
import torch
import torch.distributed as dist
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard

pytestmark = pytest.mark.filterwarnings("ignore")


FAULTS = []  # of the machine: what a module holds is put back for a replay


class Net(Assembled):
    """Divides by 0 where its input is 0, which one rank's is in a step."""

    def forward(self, x):
        hidden = self.first(x)
        if FAULTS:
            hidden = hidden * FAULTS.pop()
        return self.last(hidden / hidden.abs().amax(-1, keepdim=True))


def trained(policy, fault):
    """Three steps, of which the second is bad on the last rank alone."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        Net(first=nn.Linear(4, 4, bias=False), last=nn.Linear(4, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = OverflowGuard(model, optimizer, policy, watch="tripwire", explain=True)
    report, changed = None, []
    for step in range(3):
        optimizer.zero_grad()
        is_bad = step == 1 and dist.get_rank() == 1
        x = torch.zeros(3, 4) if is_bad and fault == "data" else torch.ones(3, 4)
        FAULTS[:] = [torch.inf] * (is_bad and fault == "transient")
        before = [p.detach().clone() for p in model.parameters()]
        guard.run(lambda x=x: model(x).pow(2).mean()).backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            report = error.report
            break
        pairs = zip(before, model.parameters(), strict=True)
        changed.append(any(not torch.equal(a, b) for a, b in pairs))
    report = report or guard.last_report
    guard.remove()
    found, first = report.explanation, report.verdict.first
    weights = [p.detach().clone() for p in model.parameters()]
    return {
        "first": (first.kind, first.label, report.where),
        "found": (found.cause, found.op and found.op.name, str(report)),
        "notes": report.notes,
        "changed": changed,
        "weights": weights,
    }


def all_of_them():
    return {
        "raise": trained("raise", "data"),
        "skip": trained("skip", "data"),
        "transient": trained("raise", "transient"),
    }


def test_all_ranks_see_what_one_has_made(as_kept):
    one, other = ranks.on_ranks(2, all_of_them)
    for name in one:
        a, b = one[name], other[name]
        assert a["first"] == b["first"] and a["found"] == b["found"], name
        assert a["changed"] == b["changed"]
        assert all(map(torch.equal, a["weights"], b["weights"]))
    kind, _, where = one["raise"]["first"]
    assert kind in ("output", "input")
    as_kept(where)
    assert one["raise"]["found"][:2] == ("undefined", "aten.div.Tensor")
    assert one["skip"]["changed"] == [True, False, True]
    as_kept(" ".join(one["transient"]["notes"]))
