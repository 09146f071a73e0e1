"""Copies of tensors, in the memory of earlier copies where there are any."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..torch_internals.tensor_internals import copy_all


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor to memory of its own on the host, as safetensors writes it.

    It refuses tensors that share memory, and writes a conjugate as it lies.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


def copy_tensors(
    tensors: Sequence[torch.Tensor], earlier: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Copies tensors, with few kernels. Does not incur a CPU-GPU sync.

    Args:
        tensors: The tensors, of any shapes, dtypes and devices.
        earlier: An earlier copy for each, or None. Its memory is reused if it has the
            same shape, dtype, device and layout.

    Returns:
        The copies, in the order of the tensors.
    """
    if not tensors:
        return []
    copies: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    with torch.no_grad():
        for tensor, copy in zip(tensors, earlier, strict=True):
            if copy is None or not _can_hold(copy, tensor):
                copy = tensor.detach().clone()
            else:
                targets.append(copy)
                sources.append(tensor)
            copies.append(copy)
        if targets:
            copy_all(targets, sources)
    return copies


def _can_hold(copy: torch.Tensor, tensor: torch.Tensor) -> bool:
    own, its = (
        (each.shape, each.dtype, each.device, each.layout) for each in (copy, tensor)
    )
    # Outside of inference mode an inference tensor cannot be written to.
    return own == its and copy.layout is torch.strided and not copy.is_inference()
