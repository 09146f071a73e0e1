"""Buffers that forwards change, such as running statistics: put back by a skip."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..recording.watch import ModelWatch
from ..torch_internals.module_internals import BUFFERS, MODULES, PARAMETERS
from ..torch_internals.running import graph_task_id, is_recorded
from ..torch_internals.tensor_internals import copy_all, version_of

# Up to so many bytes a tensor is copied in each step. A larger one only once it has
# been seen to change; whether it does is looked up after steps 1, 2, 4, 8, ...
_SMALL = 2**16
# Of larger frozen parameters there is no copy before one is seen to change.
_MAX_FROZEN = 2**20


class BufferSnapshot:
    """The models' buffers as they were when the first forward of a step began.

    That is the restore point of a step that never happened. Frozen parameters may be
    statistics too, and count as buffers. What users write between steps is in it.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._points = [_Point(watch) for watch in watches]
        self._of_watch = dict(zip(watches, self._points, strict=True))
        self._num_kept = 0

    def begin(self) -> None:
        """Makes the buffers as they are now the restore point, until a forward does."""
        for point in self._points:
            point.take(is_firm=False)

    def prepare(self) -> None:
        """Does so for models whose forwards no hook tells of."""
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
        """Takes in what a forward itself has written to, as far as autograd notices."""
        for kept in self._of_watch[watch].kept:
            kept.end_forward()

    def hold(self, watch: ModelWatch) -> None:
        """Keeps the restore point before a forward without autograd: it was bad."""
        self._of_watch[watch].is_firm = self._of_watch[watch].is_taken

    def keep(self) -> None:
        """Makes the buffers as they are for good: the step has happened.

        Incurs a CPU-GPU sync after steps 1, 2, 4, 8, ... where large buffers have not
        been seen to change.
        """
        self._num_kept += 1
        looks = self._num_kept & (self._num_kept - 1) == 0
        for point in self._points:
            point.keep(looks)

    def restore(self) -> list[str]:
        """Puts the buffers back. Incurs a CPU-GPU sync for each.

        The next forward makes a restore point of its own; in the middle of a backward,
        what that computes again may change them once more.

        Returns:
            What could not be put back, in sentences.
        """
        texts = [text for point in self._points for text in point.restore()]
        for point in self._points:
            point.release(is_over=graph_task_id() < 0)
        return texts

    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts them back where a flag on the device is not 0. Does not incur a sync."""
        for point in self._points:
            point.restore_where(flag)


class _Point:
    """The restore point of one model."""

    def __init__(self, watch: ModelWatch) -> None:
        self._watch = watch
        self._known: dict[tuple[int, str], _Kept] = {}
        self.kept: list[_Kept] = []
        self.is_taken = False
        self.is_firm = False

    @torch.no_grad()
    def take(self, is_firm: bool) -> None:
        self.is_taken = self.is_firm = False  # until all of it is copied
        model = self._watch.model
        self.kept = [] if model is None else list(map(self._keep, _slots(model)))
        if len(self._known) > len(self.kept):
            self._known = {kept.slot: kept for kept in self.kept}
        _copy([kept for kept in self.kept if kept.needs_copy()])
        self.is_taken, self.is_firm = True, is_firm

    def _keep(self, found: tuple[nn.Module, str, str]) -> _Kept:
        module, table, name = found
        kept = self._known.get((id(module), name))
        if kept is None or kept.module() is not module or kept.table != table:
            kept = self._known[id(module), name] = _Kept(module, table, name)
        kept.begin(module.__dict__[table][name])
        return kept

    @torch.no_grad()
    def keep(self, looks: bool) -> None:
        for kept in self.kept:
            kept.end(looks)
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
        """Makes the buffers the restore point where no hook tells of a forward."""
        is_told = self._watch.is_attached and not self._watch.has_submodule_calls
        if not (self.is_taken or is_told):
            self.take(is_firm=False)

    @torch.no_grad()
    def restore(self) -> Iterator[str]:
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
        for kept in self.kept if self.is_taken else []:
            kept.restore_where(flag)

    def _name(self, kept: _Kept) -> str:
        watch, model = self._watch, self._watch.model
        kind = "buffer" if kept.table == BUFFERS else "frozen parameter"
        for name, module in [] if model is None else model.named_modules():
            if module is kept.module():
                return f"The {kind} {watch.prefix}{name}{'.' * bool(name)}{kept.name}"
        return f"The {kind} {kept.name}"


class _Kept:
    """One buffer: which tensor it was, and what was in it."""

    def __init__(self, module: nn.Module, table: str, name: str) -> None:
        self.module = weakref.ref(module)
        self.slot = id(module), name
        self.table = table
        self.name = name
        self.copy: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None  # from the step's beginning to its end
        self._of: weakref.ref[torch.Tensor] | None = None  # what the copy is of
        self._version: int | None = None
        self._home: weakref.ref[torch.Tensor] | None = None  # the last step's
        self._changes = False
        self._is_replaced = False
        self._is_written = False  # in place, by this step's forward
        self._memory: torch.Tensor | None = None  # what was the tensor's
        self._was_lazy = False

    def begin(self, tensor: torch.Tensor | None) -> None:
        """Takes in which tensor it is now."""
        self.tensor = tensor
        self._was_lazy = tensor is not None and is_lazy(tensor)
        self._is_written = False
        self._memory = None
        if tensor is not None and not self._was_lazy and _has_pointer(tensor):
            self._memory = tensor.data
        if self._home is None and tensor is not None:
            self._home = weakref.ref(tensor)

    def needs_copy(self) -> bool:
        """Whether what is in it has to be copied."""
        tensor = self.tensor
        if tensor is None or self._was_lazy or tensor.is_meta:
            self.copy = self._of = None
            return False
        version = _version_of(tensor)
        if not self._is_certain:
            is_known = self._of is not None and self._of() is tensor
            if is_known and version is not None and version == self._version:
                return False
            if self.table == PARAMETERS and _num_bytes(tensor) > _MAX_FROZEN:
                self._remember(version)
                self.copy = None
                return False
        self._remember(version)
        return True

    def _remember(self, version: int | None) -> None:
        assert self.tensor is not None
        self._of, self._version = weakref.ref(self.tensor), version

    def end_forward(self) -> None:
        """Takes in whether a forward has written to it."""
        if self.tensor is not None and not self._was_lazy:
            self._is_written |= _version_of(self.tensor) != self._version

    def end(self, looks: bool) -> None:
        """Takes in whether a step has changed it."""
        before, now, self.tensor = self.tensor, self._current(), None
        self._memory = None
        self._home = None if now is None else weakref.ref(now)
        if before is None:
            return
        if now is not before:
            self._is_replaced = True
        elif not self._changes and not self._was_lazy and not before.is_meta:
            is_written = _version_of(before) != self._version
            self._changes = is_written or (looks and not self._is_same(before))

    def restore(self) -> str:
        """Puts it back; returns why it could not be done, or ""."""
        module, before = self.module(), self.tensor
        if module is None:
            return ""
        if self._was_lazy:
            return _reset(module)
        now = self._current()
        if now is not before:
            self._put_in_place(module, now, before)
        if before is None or before.is_meta:
            return ""
        if self._memory is not None and _pointer(before) != _pointer(self._memory):
            before.data = self._memory
        elif now is before and not self._is_replaced:
            pass
        elif not self._is_written:
            return ""  # its contents are somebody else's since: a batch's, say
        is_written = _version_of(before) != self._version
        if self.copy is None:
            return "it is large, and had not changed before" if is_written else ""
        if self._is_same(before):
            return ""
        if not is_written and not self._is_certain:
            return "it was written to unseen, in this step or before"
        try:
            _write(before, self.copy)
        except Exception:  # a layout that cannot be written to
            module.__dict__[self.table][self.name] = _like(before, self.copy.clone())
        self._remember(_version_of(before))
        return ""

    def _put_in_place(
        self, module: nn.Module, now: torch.Tensor | None, before: torch.Tensor | None
    ) -> None:
        # For one call, functional_call has tensors in place that it takes away again.
        is_home = now is not None and self._home is not None and self._home() is now
        is_plain = all(type(each) is nn.Parameter for each in (now, before))
        if not is_home and (is_plain or self.table == BUFFERS):
            module.__dict__[self.table][self.name] = before

    @property
    def _is_certain(self) -> bool:
        """Whether the copy is of this step, and not of an earlier one."""
        assert self.tensor is not None
        return self._changes or _num_bytes(self.tensor) <= _SMALL

    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts its contents back where a flag is not 0."""
        now = self._current()
        if now is None or now is not self.tensor or self.copy is None:
            return
        if self._is_replaced or now.is_meta:
            return
        if self._is_certain or _version_of(now) != self._version:
            is_bad = flag.to(now.device, non_blocking=True) != 0
            now.data.copy_(torch.where(is_bad, self.copy, now))

    def _current(self) -> torch.Tensor | None:
        module = self.module()
        table = {} if module is None else module.__dict__[self.table]
        found: torch.Tensor | None = table.get(self.name)
        return found

    def _is_same(self, tensor: torch.Tensor) -> bool:
        """Whether the copy has every bit of a tensor."""
        copy = self.copy
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            return copy is None
        try:
            return torch.equal(_bits(copy), _bits(tensor))
        except Exception:  # a layout that has no bytes to show
            return False


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields where the buffers and frozen parameters of a model are, each place once.

    `named_modules()` would take several times as long.
    """
    waiting, seen = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its tensors are TorchScript's
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


def _copy(kept: list[_Kept]) -> None:
    """Copies what is in them, into the copies that there are."""
    to: list[torch.Tensor] = []
    of: list[torch.Tensor] = []
    for each in kept:
        tensor, copy = each.tensor, each.copy
        assert tensor is not None
        if copy is None or not _is_alike(copy, tensor):
            each.copy = tensor.detach().clone()
        else:
            to.append(copy)
            of.append(tensor)
    if to:
        copy_all(to, of)


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        (a.shape, a.dtype, a.device, a.layout) == (b.shape, b.dtype, b.device, b.layout)
        and a.layout is torch.strided
        and a.is_inference() == b.is_inference()
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: a nan equals itself, and -0 does not equal 0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Copies into a tensor, once where it is expanded."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, copy = tensor.narrow(dim, 0, 1), copy.narrow(dim, 0, 1)
    tensor.data.copy_(copy)  # autograd may have saved it, and is not to notice


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=False)
    return copy


def _has_pointer(tensor: torch.Tensor | None) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor is not None and tensor.layout is torch.strided


def _pointer(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


def _reset(module: nn.Module) -> str:
    """Undoes what the forward did that has made lazy statistics."""
    reset = getattr(module, "reset_running_stats", None)
    if reset is None:
        return "it was not initialized before this step"
    reset()
    return ""
