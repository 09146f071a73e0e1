"""Buffers that forwards change, such as running statistics: put back by a skip."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .watch import ModelWatch


class BufferKeeper:
    """Copies of the models' changing buffers, as they were after the last good step.

    A bad batch that goes through a BatchNorm leaves its running statistics bad, and a
    step that never happened has to leave them alone. Which buffers change is found out
    after the first step, by one comparison; the others need no copy from then on.

    Args:
        watches: The watched models.
    """

    def __init__(self, watches: Sequence[ModelWatch]) -> None:
        self._watches = watches
        self._saved: dict[tuple[int, str], torch.Tensor] = {}
        self._is_sifted = False

    def begin(self) -> None:
        """Copies the buffers as they are now; before the first step all of them."""
        if self._is_sifted:
            return self.keep()
        for key, buffer in self._buffers().items():
            if buffer.layout is torch.strided and not buffer.is_meta:
                self._saved[key] = buffer.detach().clone()

    @torch.no_grad()
    def keep(self) -> None:
        """Takes the buffers as they are for good. Incurs a CPU-GPU sync once."""
        if not self._saved:
            return
        now = self._current()
        if not self._is_sifted:
            self._is_sifted = True
            self._saved = {
                key: saved
                for key, saved in self._saved.items()
                if key in now and not _is_same(saved, now[key])
            }
            now = self._current()
        if now:
            torch._foreach_copy_([self._saved[key] for key in now], list(now.values()))

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the buffers back. Does not incur a CPU-GPU sync."""
        now = self._current()
        if now:
            torch._foreach_copy_(list(now.values()), [self._saved[key] for key in now])

    @torch.no_grad()
    def restore_where(self, flag: torch.Tensor) -> None:
        """Puts them back where a flag on the device is not 0, and keeps them.

        Does not incur a CPU-GPU sync, but for the first time.
        """
        if not self._is_sifted:
            return self.restore() if flag.item() else self.keep()
        for key, buffer in self._current().items():
            is_bad = flag.to(buffer.device, non_blocking=True) != 0
            buffer.copy_(torch.where(is_bad, self._saved[key], buffer))
            self._saved[key].copy_(buffer)

    def _current(self) -> dict[tuple[int, str], torch.Tensor]:
        """The buffers that have a copy of their shape."""
        return {
            key: buffer
            for key, buffer in self._buffers().items()
            if key in self._saved and _is_alike(self._saved[key], buffer)
        }

    def _buffers(self) -> dict[tuple[int, str], torch.Tensor]:
        return {
            (i, name): buffer
            for i, watch in enumerate(self._watches)
            if (model := watch.model) is not None
            for name, buffer in zip(
                *watch.tensors.buffers(model, all_modules=True), strict=True
            )
        }


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal; a nan is equal to a nan."""
    return _is_alike(a, b) and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
