"""Takes what a training loop hands over: batches, losses, functions to run again."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .. import _C
from ..base.graph import leaves_of
from ..base.losses import loss_in
from ..base.modules import parameters_of
from .core import GuardCore
from .requests.requests import Requests
from .watching.judged_tensors import JudgedTensors
from .watching.loop_batches import LoopBatch
from .watching.watch import models_of

_log = logging.getLogger("overflow_fast")
# Names of recorded tensors, each of which takes 2 KiB for good. Tensors beyond share a
# name with a star in place of digits.
_MAX_NAMES = 1000
# Calls without a step, before it is said that they run another model. With fewer, a
# program that first runs another model a few times is warned in vain.
_MANY_OF_OTHERS = 8
_UNWATCHED = (
    f"guard.run() was called {_MANY_OF_OTHERS} times, and nothing of the model that "
    "the guard watches ran in it.\nWhere a cell has made the model anew, make the "
    "guard anew as well, of the model and the optimizer that run now. Logged once."
)
_STEP_WITHIN = (
    "The function that guard.run() was given has called optimizer.step(): a bad step "
    "cannot be run again to explain it. Return the loss from the function, and call "
    "backward() and step() behind guard.run(). Logged once."
)


class LoopInputs:
    """Takes in what the training loop hands over for the step at hand.

    Args:
        guard: The guard's core.
        tensors: Scans what stands in no module's call.

    Attributes:
        on_left: Called with the exception that has left the outermost function.
    """

    def __init__(self, guard: GuardCore, tensors: JudgedTensors) -> None:
        self._config, self._watches = guard.config, guard.watches
        self._keeper, self._clock = guard.keeper, guard.clock
        self._tensors, self._isolation = tensors, guard.isolation
        self._num_running = 0
        self._said = set[str]()
        # The number of calls in a row that ran another model, and of steps by then.
        self._of_others = 0, 0
        self.on_left: Callable[[Exception], None] = lambda error: None
        self.requests: Requests | None = None
        self._names: set[str] = set()

    @property
    def is_running(self) -> bool:
        """True while a function runs that calls the models."""
        return self._num_running > 0

    def note_batch(self, batch: object, caller: str | None) -> None:
        """Notes the batch of a trainer's step; see `OverflowGuard.note_batch()`."""
        with self._isolation.measured():
            noted = None if batch is None else LoopBatch(batch)
            for watch in self._watches:
                if caller is not None:
                    watch.inputs.caller = caller
                number, num_calls = watch.batch_number, watch.total_calls
                watch.inputs.loop_batches.note(number, num_calls, noted)

    def run(self, function: Callable[[], Any], records_loss: bool = True) -> Any:
        """Calls a function that calls the models; keeps it until the step is judged."""
        if _C.is_unwatched():  # a replay of another guard's, whose function calls this
            return function()
        models = [watch.model for watch in self._watches]
        if self.requests is not None and self.requests.forwards.takes(models):
            return self.requests.run(function)
        model, seen = self._watches[0].model, self._seen()
        is_watched, step = self._clock.is_watched, self._clock.step
        self._num_running += 1
        try:
            if self._keeper is None or model is None or not is_watched:
                output = function()
            else:
                output = self._keeper.run(model, function, self._isolation.isolated)
        except Exception as error:
            if self._num_running == 1:
                self.on_left(error)
            raise
        finally:
            self._num_running -= 1
        with self._isolation.isolated():
            if self._clock.step != step:
                self._warn_once(_STEP_WITHIN)
            loss = loss_in(output)
            has_backward = is_watched and loss is not None and loss.requires_grad
            if has_backward:
                self._note_models(loss, is_unseen=seen == self._seen())
            if loss is not None and self._config.wanted.loss and records_loss:
                self.record({"loss": loss})
            if has_backward:
                self._record_state()
        return output

    def _seen(self) -> list[tuple[int, int]]:
        """The numbers of forwards, and of calls, that watches have seen."""
        return [(each.batch_number, each.total_calls) for each in self._watches]

    def _note_models(self, loss: torch.Tensor | None, is_unseen: bool) -> None:
        """Logs, once, that functions run other models than those that are watched.

        Args:
            loss: The loss that one has returned.
            is_unseen: No watch has seen a call in it. A tripwire sees none of a model
                whose forward is not called: where the loss has its weights, it ran.
        """
        if _UNWATCHED in self._said:
            return
        is_of_others = is_unseen and any(each.is_attached for each in self._watches)
        if is_of_others:
            models = models_of(self._watches).values()
            own = {id(each) for model in models for each in parameters_of(model)}
            is_of_others = all(id(each) not in own for each in leaves_of(loss))
        num, num_steps = self._of_others
        is_in_row = is_of_others and num_steps == self._clock.num_steps
        self._of_others = num * is_in_row + is_of_others, self._clock.num_steps
        if self._of_others[0] == _MANY_OF_OTHERS:
            self._warn_once(_UNWATCHED)

    def _record_state(self) -> None:
        """Scans what the function has written to modules around the models."""
        late = self._config.verdicts_are_late  # the step's beginning is gone by then
        if self._keeper is None or late or not self._config.wanted.buffers:
            return
        around = {each.name: each.now for each in self._keeper.start.around}
        floats = {n: each for n, each in around.items() if each.is_floating_point()}
        named = list(floats), list(floats.values())
        self._watches[0].record(_C.FrameKind.BUFFERS, named)

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning(text)

    def record(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Adds tensors that no module returns to the step, if it is watched."""
        requests = self.requests
        if requests is not None and requests.forwards.takes_now:
            requests.record(tensors)
            return
        watch, is_watched = self._watches[0], self._clock.is_watched
        if not (is_watched and tensors) or _C.is_unwatched():
            return
        watch.has_seen_loss |= "loss" in tensors
        watch.has_loss_of_step |= "loss" in tensors
        names = [self._kept_name(name) for name in tensors]
        watch.record(_C.FrameKind.RECORDED, (names, list(tensors.values())))

    def _kept_name(self, name: str) -> str:
        """The name under which a tensor is kept track of, which takes memory for good.

        Beyond some, what is counted up in a name becomes a star: "loss_*".
        """
        if name in self._names:
            return name
        if len(self._names) == _MAX_NAMES:
            _log.warning(
                "guard.record() was given %d names. Later ones are reported with * in "
                "the place of their digits: give a tensor the same name in each step.",
                _MAX_NAMES,
            )
        if len(self._names) >= _MAX_NAMES:
            name = re.sub(r"\d+", "*", name)
            if name not in self._names and len(self._names) >= 2 * _MAX_NAMES:
                return "*"
        self._names.add(name)
        return name

    def on_clipped(
        self, parameters: Sequence[torch.Tensor], norm: torch.Tensor
    ) -> None:
        """Notes a norm that `clip_grad_norm_` has computed; see `clipping.listen`."""
        if self._clock.is_watched and not _C.is_unwatched():
            with self._isolation.measured():
                # Of float16 it is counted how many stand at its largest number.
                wider = [p for p in parameters if p.dtype is not torch.float16]
                self._tensors.clippings.note(wider, norm)
