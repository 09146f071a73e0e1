"""Trains on some losses and on a bad one."""

import pytest
import torch

from overflow_fast import NonFiniteError, OverflowGuard


def failed(model, loss, policy="raise", before=(), **options):
    """Trains on some losses, and on one that is bad; returns report and guard."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = OverflowGuard(model, optimizer, policy, **options)
    with guard:
        for each in before:
            guard.run(each).backward()
            optimizer.step()
            optimizer.zero_grad()
        guard.run(loss).backward()
        if policy == "raise":
            with pytest.raises(NonFiniteError) as error:
                optimizer.step()
            return error.value.report
        optimizer.step()
        return guard.last_report
