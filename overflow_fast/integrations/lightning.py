"""The guard as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from ..guard.guard import OverflowGuard
from .guarded import GuardOwner, SaveGate

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError(
        "overflow_fast.integrations.lightning needs lightning: run "
        f"`pip install lightning` ({error})"
    ) from error


class GuardCallback(GuardOwner, Callback):
    """Has an `OverflowGuard` watch while a Trainer fits; see `GuardOwner`.

    The modules that the LightningModule is made of are watched, and the schedules of
    automatic optimization stand still in skipped steps. The guard's metrics go to the
    Trainer's loggers, every `log_every_n_steps`. While it fits, a checkpoint that would
    not be finite is not saved, and none removed for it: `NonFiniteError` instead.

    Example:
        >>> callback = GuardCallback(on_overflow="skip", log="guard.jsonl")
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the guard on."""
        # training_step() is no forward: its parts are what is called.
        models = dict(pl_module.named_children()) or pl_module
        guard = self.put_on(models, list(trainer.optimizers))
        stepper = _Stepper(pl_module, guard)
        pl_module.lr_scheduler_step = stepper  # type: ignore[method-assign]
        gate = SaveGate(trainer.save_checkpoint, guard)
        trainer.save_checkpoint = gate  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        """Gives the loggers what the guard measures."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.guard is None or not every or trainer.global_step % every:
            return
        values = {f"overflow_fast/{k}": v for k, v in self.guard.metrics().items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Takes the guard off; a verdict that came now would hide the exception."""
        if self.guard is not None:
            self.guard.disable()
        self.teardown(trainer, pl_module, "fit")

    def teardown(
        self, trainer: Trainer, pl_module: LightningModule, stage: str
    ) -> None:
        """Takes the guard off."""
        vars(pl_module).pop("lr_scheduler_step", None)
        vars(trainer).pop("save_checkpoint", None)
        self.take_off()


class _Stepper:
    """Steps schedulers as the module does, but for skipped steps."""

    def __init__(self, pl_module: LightningModule, guard: OverflowGuard) -> None:
        self._step = pl_module.lr_scheduler_step
        self._guard = guard

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._guard.last_step_skipped:
            self._step(*args, **kwargs)
