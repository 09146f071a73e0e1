"""What users ask of a guard beside its watching."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .fault_results import SelfTestResult
from .learning import Learning
from .options import make_watches
from .report import NonFiniteError
from .self_test import Loss, SelfTest
from .state import state_report
from .supervisor import Supervisor


def check_learning(supervisor: Supervisor) -> None:
    """Raises ValueError if a guard does not look at what it would learn from."""
    wanted = supervisor.options.wanted
    if not (wanted.activations and wanted.gradients):
        raise ValueError(
            "learn() needs a guard whose watch holds 'activations' and 'gradients': "
            "those tell what is not finite, and that it is harmless"
        )


def learn(supervisor: Supervisor, steps: int, adopt: bool) -> None:
    """Learns from the next clean steps what is not finite by design."""
    decision = supervisor.decision
    decision.learning = Learning(
        steps, adopt, supervisor.rules, supervisor.watches, decision.agreement
    )


def assert_finite_state(
    supervisor: Supervisor,
    models: Mapping[str, nn.Module] | None,
    optimizers: Sequence[Optimizer] | None,
    joint: bool,
) -> None:
    """Raises if the state of these, or of what is watched, is not finite."""
    if models is None:
        models = _models_of(supervisor)
    if optimizers is None:
        optimizers = supervisor.optimizers
    report = state_report(models, optimizers, supervisor.rules, supervisor.step)
    if joint:
        report = supervisor.decision.agreement.agree_on(supervisor.step, report)
    if report is not None:
        raise NonFiniteError(report)


def self_test(
    supervisor: Supervisor,
    batch: Any,
    loss: Loss | None,
    layers: Sequence[str] | None,
    most: int,
) -> SelfTestResult:
    """Plants faults under watches like the guard's, while that looks away."""
    watches = make_watches(
        _models_of(supervisor),
        dataclasses.replace(supervisor.options, evidence=None),
        supervisor.rules,
        lambda _: None,
        supervisor.defer,
    )
    gather = supervisor.decision.agreement.gather
    test = SelfTest(watches, batch, loss, layers, most, gather)
    with supervisor.looking_away():
        return test.run()


def _models_of(supervisor: Supervisor) -> dict[str, nn.Module]:
    watches = supervisor.watches
    models = {w.prefix: w.model for w in watches if w.model is not None}
    if not models:
        raise RuntimeError(
            "the model is gone: the guard holds it weakly, so keep it yourself"
        )
    return models
