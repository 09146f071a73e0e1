"""What a restore point leaves alone: autograd, transforms, large tensors."""

import pytest
import torch
from buffers import BAD, LARGE, Stateful, X, everything, norm_net, step, watched
from guarding import NAN, assert_same
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard


def test_what_cannot_be_put_back_is_said_and_the_step_is_not_made(monkeypatch, as_kept):
    from overflow_fast.guard.undo import kept_place

    def fail(*_):
        raise NotImplementedError("no such kernel")

    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        weight = model[0].weight.detach().clone()
        monkeypatch.setattr(kept_place, "write", fail)
        step(model, optimizer, BAD)
        assert weight.equal(model[0].weight)
        assert guard.last_step_skipped
    as_kept(guard.last_report.notes)


def test_large_frozen_parameters_are_not_copied(monkeypatch, as_kept):
    from overflow_fast.guard.undo import kept_place

    monkeypatch.setattr(kept_place, "_MAX_FROZEN", 2**16)
    frozen = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
    model = Stateful(lambda self, x: None, kept=frozen)
    optimizer, guard = watched(model)
    with guard:
        for _ in range(3):
            step(model, optimizer)
        starts = guard._parts._start.starts
        assert all(k.copy is None for s in starts for k in s.buffers)
        model.write = lambda self, x: self.kept.add_(x.sum())
        step(model, optimizer, BAD)
        as_kept(guard.last_report.notes)


def test_functional_calls_leave_the_models_own_buffers_in_place():
    model = norm_net()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        own = model[1].running_mean
        before = everything(model)
        state = {**dict(model.named_parameters()), "1.running_mean": torch.ones(4)}
        optimizer.zero_grad()
        torch.func.functional_call(model, state, (BAD,)).sum().backward()
        optimizer.step()
        assert guard.last_step_skipped
        assert model[1].running_mean is own
        assert_same(model[1].running_mean, before["1.running_mean"])


def test_forwards_in_transforms_and_traces():
    model = norm_net().eval()
    optimizer, guard = watched(model)
    with guard:
        step(model, optimizer)
        before = everything(model)
        torch.func.vmap(model)(X[:, None])
        traced = torch.jit.trace(model, X)
        assert not any("copy" in str(n) for n in traced.graph.nodes())
        assert_same(everything(model), before)
        step(model, optimizer, BAD)
        assert_same(everything(model), before)


def test_a_graph_that_is_kept_can_still_be_used():
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    heads = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
    with OverflowGuard([body, *heads], optimizers, "skip") as guard:
        hidden = body(X)
        (heads[0](hidden).sum() * NAN).backward(retain_graph=True)
        optimizers[0].step()
        heads[1](hidden).sum().backward()
        optimizers[1].step()
        assert guard.num_skipped == 1


@pytest.mark.parametrize("policy", ["skip", "warn", "raise"])
@pytest.mark.parametrize("make", [torch.jit.script, None])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_in_torchscript(make, policy, caplog):
    part = nn.Linear(4, 1)
    part = torch.jit.trace(part, torch.randn(3, 4)) if make is None else make(part)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), part)
    with caplog.at_level("INFO", "overflow_fast"):
        optimizer, guard = watched(model, policy)
        with guard:
            step(model, optimizer)
            before = everything(model)
            if policy == "raise":
                with pytest.raises(NonFiniteError):
                    step(model, optimizer, BAD)
            else:
                step(model, optimizer, BAD)
            assert guard.last_report is not None
            assert guard.coverage().failures == 0
            if policy == "skip":
                assert_same(everything(model), before)


def test_a_policy_that_only_warns_copies_nothing():
    model = norm_net()
    optimizer, guard = watched(model, "warn", explain=False)
    with guard:
        step(model, optimizer)
        assert guard._parts._start is None
