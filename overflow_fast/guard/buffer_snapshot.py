"""The restore point of a skipped step: buffers that forwards change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..core.tensor_copies import copy_tensors
from ..recording.watch import ModelWatch
from ..torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS
from ..torch_internals.running import graph_task_id, is_recorded
from .kept_buffer import KeptBuffer


class BufferSnapshot:
    """The models' buffers as they were when the first forward of a step began.

    Frozen parameters may hold statistics too, and count as buffers. Writes of the user
    between steps belong to the restore point.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._points = [_RestorePoint(watch) for watch in watches]
        self._of_watch = dict(zip(watches, self._points, strict=True))
        self._num_kept = 0

    def begin(self) -> None:
        """Makes the current buffers the restore point until a forward replaces it."""
        for point in self._points:
            point.take(is_firm=False)

    def prepare(self) -> None:
        """Makes a restore point for models whose forwards no hook announces."""
        for point in self._points:
            point.prepare()

    def before_forward(self, watch: ModelWatch) -> None:
        """Makes a model's buffers the restore point, in a step's first forward.

        A forward without autograd makes one that lasts until a forward with it begins.
        """
        point = self._of_watch[watch]
        if not (point.is_firm or is_recorded()):
            point.take(is_firm=torch.is_grad_enabled())

    def after_forward(self, watch: ModelWatch) -> None:
        """Notes which buffers the forward has written to, by their versions."""
        for kept in self._of_watch[watch].kept:
            kept.end_forward()

    def hold(self, watch: ModelWatch) -> None:
        """Keeps the restore point before a non-finite forward without autograd."""
        self._of_watch[watch].is_firm = self._of_watch[watch].is_taken

    def keep(self) -> None:
        """Makes the current buffers the restore point: the step was made.

        Incurs a CPU-GPU sync after steps 1, 2, 4, 8, ... where large buffers have not
        been seen to change.
        """
        self._num_kept += 1
        compares = self._num_kept & (self._num_kept - 1) == 0
        for point in self._points:
            point.keep(compares)

    def restore(self) -> list[str]:
        """Puts the buffers back. Incurs a CPU-GPU sync for each.

        The next forward makes a new restore point. During backward, recomputed
        checkpoints may change the buffers again.

        Returns:
            A sentence for each buffer that could not be put back.
        """
        texts = [text for point in self._points for text in point.restore()]
        for point in self._points:
            point.release(is_over=graph_task_id() < 0)
        return texts

    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts them back where a flag on the device is not 0. Does not incur a sync."""
        for point in self._points:
            point.restore_where(flag)


class _RestorePoint:
    """The restore point of one model.

    Attributes:
        kept: The buffers of the step at hand.
        is_taken: The restore point is complete.
        is_firm: No further forward of this step replaces it.
    """

    def __init__(self, watch: ModelWatch) -> None:
        self._watch = watch
        self._known: dict[tuple[int, str], KeptBuffer] = {}
        self.kept: list[KeptBuffer] = []
        self.is_taken = False
        self.is_firm = False

    @torch.no_grad()
    def take(self, is_firm: bool) -> None:
        """Makes the current buffers the restore point."""
        self.is_taken = self.is_firm = False  # until all of it is copied
        model = self._watch.model
        self.kept = [] if model is None else list(map(self._keep, _slots(model)))
        if len(self._known) > len(self.kept):
            self._known = {kept.slot: kept for kept in self.kept}
        _copy([kept for kept in self.kept if kept.needs_copy()])
        self.is_taken, self.is_firm = True, is_firm

    def _keep(self, found: tuple[nn.Module, str, str]) -> KeptBuffer:
        module, table, name = found
        kept = self._known.get((id(module), name))
        if kept is None or kept.module() is not module or kept.table != table:
            kept = self._known[id(module), name] = KeptBuffer(module, table, name)
        kept.begin(module.__dict__[table][name])
        return kept

    @torch.no_grad()
    def keep(self, compares: bool) -> None:
        """Ends the step, which was made."""
        for kept in self.kept:
            kept.end(compares)
        self.kept = []
        self.is_taken = self.is_firm = False
        self.prepare()

    def release(self, is_over: bool) -> None:
        """Lets the next forward make a restore point."""
        self.is_firm = False
        if is_over:
            self.is_taken = False
            self.prepare()

    def prepare(self) -> None:
        """Makes the buffers the restore point where no hook announces a forward."""
        is_announced = self._watch.is_attached and not self._watch.has_submodule_calls
        if not (self.is_taken or is_announced):
            self.take(is_firm=False)

    @torch.no_grad()
    def restore(self) -> Iterator[str]:
        """Puts the buffers back; yields a sentence for each that stays changed."""
        if not self.is_taken:
            return
        self._remove_new()
        for kept in self.kept:
            try:
                why = kept.restore()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
            if why:
                yield f"{self._name(kept)} could not be put back ({why})."

    def _remove_new(self) -> None:
        """Removes buffers that the forward has registered."""
        model = self._watch.model
        known = {kept.slot for kept in self.kept}
        for module, table, name in [] if model is None else list(_slots(model)):
            if table == BUFFERS and (id(module), name) not in known:
                del module.__dict__[table][name]

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts the buffers back where a flag on the device is not 0."""
        for kept in self.kept if self.is_taken else []:
            kept.restore_where(flag)

    def _name(self, kept: KeptBuffer) -> str:
        watch, model = self._watch, self._watch.model
        kind = "buffer" if kept.table == BUFFERS else "frozen parameter"
        for name, module in [] if model is None else model.named_modules():
            if module is kept.module():
                return f"The {kind} {watch.prefix}{name}{'.' * bool(name)}{kept.name}"
        return f"The {kind} {kept.name}"


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields the places of a model's buffers and frozen parameters, each once.

    `named_modules()` would take several times as long.
    """
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # TorchScript owns its tensors
        own = module.__dict__
        for name in own[BUFFERS]:
            yield module, BUFFERS, name
        for name, parameter in own[PARAMETERS].items():
            if parameter is not None and not parameter.requires_grad:
                yield module, PARAMETERS, name
        for child in own[MODULES].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _copy(kept: list[KeptBuffer]) -> None:
    """Copies the contents, into the copies that there are."""
    tensors = [each.tensor for each in kept if each.tensor is not None]
    copies = copy_tensors(tensors, [each.copy for each in kept])
    for each, copy in zip(kept, copies, strict=True):
        each.copy = copy
