"""A guard as a callback of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ..guard.guard import OverflowGuard
from ..torch_internals.module_internals import share_tensors, submodules
from .kept_step import KeptStep
from .patched_methods import PatchedMethod
from .trainer_support import GuardOwner, check_before_saving, has_owner

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.lightning needs lightning: run "
        f"`pip install lightning` ({error})"
    ) from error


class LightningGuardCallback(GuardOwner, Callback):
    """Attaches an `OverflowGuard` to a LightningModule while a Trainer fits it.

    The guard watches the submodules, the module's own parameters and buffers, and each
    loss that backward is called on. Schedules with `interval="step"` pause in skipped
    steps of automatic optimization. A step's number is the Trainer's `global_step` when
    its batch began. During the fit, saving a non-finite checkpoint raises
    `NonFiniteError` before a file is written or removed. Trials of a tuner before the
    training are not watched.

    Args:
        evaluation: See `GuardOwner`.
        to_loggers: Send the guard's metrics to the Trainer's loggers, at the step and
            as often as Lightning's own (`log_every_n_steps`).
        arguments: Arguments of `OverflowGuard` but the model and the optimizer, by
            name.

    Raises:
        TypeError, ValueError: If an argument cannot be used.

    Example:
        >>> callback = LightningGuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def __init__(
        self,
        *,
        evaluation: Literal["log", "alarm"] = "log",
        to_loggers: bool = True,
        **arguments: Any,
    ) -> None:
        if not isinstance(to_loggers, bool):
            raise TypeError(
                f"to_loggers must be a bool, got {type(to_loggers).__name__}"
            )
        super().__init__(evaluation=evaluation, **arguments)
        self._to_loggers = to_loggers
        self._fits: list[_Fit] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fits": []}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Makes the guard."""
        self._end(trainer)
        watch = self._arguments.get("watch")
        wants_loss = watch is None or "loss" in watch
        self._fits.append(_Fit(trainer, pl_module, self.attach_guard, wants_loss))

    def on_sanity_check_start(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> None:
        """Switches the guard on."""
        self._begin(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches the guard on."""
        self._begin(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, *args: Any
    ) -> None:
        """Gives the step the Trainer's number, and notes its batch."""
        for fit in self._fits_of(trainer):
            fit.guard.step = trainer.global_step
            fit.guard.note_batch(batch, caller="training_step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        """Logs the guard's metrics; judges the batch where there is no optimizer."""
        for fit in self._fits_of(trainer):
            if not fit.has_optimizer:
                fit.guard.check()
            fit.guard.step = trainer.global_step
            fit.guard.note_batch(None)
            if self._to_loggers and _logs_now(trainer):
                fit.log_metrics()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Notes the batch of an evaluation."""
        self.note_evaluation(batch_idx, dataloader_idx)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Ends a batch of an evaluation."""
        self.note_evaluation(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Adds a report to the exception, if there is one, and removes the guard.

        A verdict that is raised at this point would hide the exception.
        """
        for fit in self._fits_of(trainer):
            fit.guard.on_raised(exception)
            fit.guard.discard()
        self._end(trainer)

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Removes the guard, after its last verdict."""
        if stage == "fit":
            self._end(trainer)

    def _fits_of(self, trainer: Trainer) -> list[_Fit]:
        return [fit for fit in self._fits if fit.trainer is trainer]

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not all(fit.is_of(trainer.optimizers) for fit in self._fits_of(trainer)):
            self.on_fit_start(trainer, pl_module)
        for fit in self._fits_of(trainer):
            fit.guard.enable()
            fit.guard.step = trainer.global_step

    def _end(self, trainer: Trainer) -> None:
        for fit in self._fits_of(trainer):
            self._fits.remove(fit)
            if self._fits:  # this one ran inside of another
                self.guard = self._fits[-1].guard
            fit.end()


class _Fit:
    """The guard of one fit, and the methods that are replaced during it.

    Args:
        trainer: The Trainer.
        pl_module: The module that it fits.
        attach_guard: Makes the guard, which is switched off at first.
        wants_loss: Record each loss that backward is called on.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        attach_guard: Callable[[Any, Any], OverflowGuard],
        wants_loss: bool,
    ) -> None:
        self.trainer = trainer
        self._optimizers = list(trainer.optimizers)
        self._models = _models_in(pl_module)  # the guard holds them weakly
        # `configure_optimizers()` may return None: Lightning puts a mock in its place.
        real = [each for each in self._optimizers if not _is_mock(each)]
        self.has_optimizer = bool(real)
        self.guard = attach_guard(self._models, real)
        self.guard.disable()
        self._patched_methods = [
            PatchedMethod(trainer, "save_checkpoint", self._check_before_saving),
            PatchedMethod(pl_module, "lr_scheduler_step", self._may_schedule),
            KeptStep(
                *(pl_module, "training_step", self.guard, ("log", "log_dict")),
                # By hand, it steps the optimizers itself.
                is_kept=lambda *_, **__: bool(pl_module.automatic_optimization),
                records_loss=False,
            ),
        ]
        if wants_loss:
            backward = PatchedMethod(trainer.strategy, "backward", self._record_loss)
            self._patched_methods.append(backward)

    def is_of(self, optimizers: Sequence[Optimizer]) -> bool:
        """Returns True if these are the optimizers that the guard has."""
        return list(map(id, optimizers)) == list(map(id, self._optimizers))

    def end(self) -> None:
        """Puts methods back and removes the guard, after its last verdict."""
        for method in self._patched_methods:
            method.remove()
        self.guard.remove()

    def log_metrics(self) -> None:
        """Sends the guard's metrics to the Trainer's loggers."""
        values = {f"overflow_fast/{k}": v for k, v in self.guard.metrics().items()}
        # With what the module logs: a logger has one call for each logged step.
        self.trainer.lightning_module.log_dict(values, on_step=True, on_epoch=False)

    def _check_before_saving(self, *args: Any, **kwargs: Any) -> None:
        check_before_saving(self.guard)

    def _may_schedule(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        if not self.guard.last_step_skipped:
            return True
        # An epoch ends also if its last step was skipped.
        configs = self.trainer.lr_scheduler_configs
        return any(c.scheduler is scheduler and c.interval == "epoch" for c in configs)

    def _record_loss(self, *args: Any, **kwargs: Any) -> None:
        # Before a GradScaler scales it.
        loss = args[0] if args else kwargs.get("closure_loss")
        if self.guard.enabled and isinstance(loss, torch.Tensor):
            self.guard.record(loss=loss)


def _is_mock(optimizer: Optimizer) -> bool:
    return type(optimizer).__name__ == "_MockOptimizer"


def _models_in(pl_module: LightningModule) -> Any:
    """The models to watch in a LightningModule, by name.

    Its forward need not be called: training_step() calls submodules. A module that is
    never called, "", holds its own parameters and buffers.
    """
    own: nn.Module = type(type(pl_module).__name__, (nn.Module,), {})()
    parts: dict[str, nn.Module] = {}
    for name, part in pl_module.named_children():
        # TorchScript has no hooks.
        is_scripted = isinstance(part, torch.jit.ScriptModule)
        (submodules(own) if is_scripted else parts)[name] = part
    if not parts:
        return pl_module
    share_tensors(own, pl_module)
    return {**parts, "": own}


def _logs_now(trainer: Trainer) -> bool:
    """Returns True if Lightning logs its metrics of the step after this batch."""
    is_automatic = trainer.lightning_module.automatic_optimization
    if is_automatic and trainer.fit_loop._should_accumulate():
        return False
    return trainer._logger_connector.should_update_logs


def add_to(trainer: Any, arguments: Mapping[str, Any]) -> Callback | None:
    """Gives a Trainer the callback, unless it has one; returns it."""
    if has_owner(trainer.callbacks):
        return None
    callback = LightningGuardCallback(**arguments)
    trainer.callbacks.append(callback)
    return callback
