"""The functions that users call, and the checks of what they are given."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...base.modules import check_module
from ...base.tensors import check_number
from ...guard.files import writing as files

if TYPE_CHECKING:
    from .comparison import Comparison
    from .recording import Recording


# Checks of what users give, before anything runs.


def make_folder(folder: Any) -> Path:
    """Makes the folder of a recording, before the step runs.

    Raises:
        TypeError: If it is no path.
        OSError: If it cannot be made.
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"folder must be a path, got {type(folder).__name__}")
    path = Path(folder)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"folder must be a folder, but {path} is a file")
    try:
        files.make_folder(path)
    except OSError as error:
        raise type(error)(f"folder cannot be made: {error}") from error
    return path


def names_of(names: Mapping[str, str] | None) -> dict[str, str]:
    """The patterns of module names, and their replacements.

    Raises:
        TypeError: If it is no mapping of texts.
        ValueError: If a text is no regular expression, or no replacement for it.
    """
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a mapping of texts, got {type(names).__name__}")
    for pattern, new in names.items():
        if not isinstance(pattern, str) or not isinstance(new, str):
            raise TypeError(f"names must map texts to texts, got {pattern!r}: {new!r}")
        try:
            re.sub(pattern, new, "")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"names has {pattern!r}: {new!r}, which is wrong: {error}"
            ) from None
    return dict(names)


def check_thresholds(threshold: Any, cosine: Any) -> None:
    """Raises a TypeError or ValueError if a threshold can highlight nothing."""
    for name, value in (("threshold", threshold), ("cosine", cosine)):
        if value is not None:
            check_number(name, value)
    if threshold is not None and (math.isnan(threshold) or threshold < 0):
        raise ValueError(f"threshold must be 0 or more, got {threshold}")
    if cosine is not None and not -1 <= cosine <= 1:
        raise ValueError(f"cosine must be from -1 to 1, got {cosine}")


def recording(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    tensors: bool = False,
    steps: Iterable[int] | None = None,
) -> Recording:
    """Records the tensors of a model's steps, to compare them with another run's.

    In the order of execution: parameters and buffers as the step begins; inputs and
    outputs of all modules; gradients of both; gradients of parameters, as backward
    leaves them and as the first optimizer of theirs finds them, else at the end of the
    step. Of each it writes its
    range, its norm, its counts of nan and inf, and a fingerprint of 1 KiB. The program
    computes the same as without it; if a file cannot be written, the recording ends
    with a warning. Incurs a few CPU-GPU syncs a step, with `tensors=True` one a tensor.

    Args:
        folder: Gets one file a rank. It may not hold a recording of this rank.
        model: The model, as it is called: wrapped by DDP, FSDP or `torch.compile`, or
            not. Of compiled code only what goes in and what comes out is recorded.
        tensors: Keep the tensors too, with the library safetensors: at most 256 MiB of
            copies wait in memory. The gradients of parameters included, this is about
            as much as the step's activations and three times its weights.
        steps: The numbers of the steps to record, from 0; None: all. Call `step()` of
            what is returned after each step but the last.

    Returns:
        A context manager around the step, or the steps.

    Raises:
        TypeError: If `model` is no module, or `folder` no path.
        OSError: If `folder` is a file, or cannot be made.
        FileExistsError: If the folder has a recording of this rank.
        ImportError: If `tensors` is True and safetensors is not installed.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with recording(tempfile.mkdtemp() + "/run_a", model):
        ...     model(torch.ones(1, 2)).sum().backward()
    """
    from .recording import Recording

    check_module(model)
    return Recording(make_folder(folder), model, tensors, steps)


def compare(
    run: str | os.PathLike[str],
    reference: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | None = None,
    threshold: float | None = None,
    cosine: float | None = None,
) -> Comparison:
    """Compares two recordings layer by layer, and names the first that differs.

    Steps are compared in their order, up to the first that differs. Modules are paired
    by the names that the model gives them, whatever wraps it; where names differ, in
    their order, by equal results and then by class and shapes. Differences are measured
    in units of what rounding explains: from 8 times on, and if what it was computed
    from differs 8 times less, a tensor counts as made differently there.

    Args:
        run: The folder of a recording.
        reference: The folder of the one to compare it with.
        names: Regular expressions in module names of `run`, and their replacements.
        threshold: Also highlight rows with a largest absolute difference above this;
            with a relative one, where there are fingerprints alone.
        cosine: Also highlight rows with a lower cosine similarity.

    Returns:
        The comparison. Print it, or see its `first`.

    Raises:
        RecordingError: If a folder holds no recording. It is a ValueError.
        ValueError: If a threshold is nan, negative, or no cosine, or a pattern wrong.
    """
    from .compare_runs import compare_runs

    check_thresholds(threshold, cosine)
    return compare_runs(run, reference, names_of(names), threshold, cosine)


def compare_live(
    model: nn.Module,
    reference: nn.Module,
    batch: Any,
    *,
    reference_batch: Any = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    backward: bool = False,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compares two models on one batch, without files.

    They run one after the other from the same random states, with copies of the tensors
    of both steps in memory. Where a layer's forward differs, that forward is run again
    to find the operation. Random states, buffers and gradients are put back, and
    nothing is stepped. Incurs a few CPU-GPU syncs for each tensor that differs.

    Args:
        model: The model.
        reference: The model that it is compared with.
        batch: What the models are called with: a tuple or list of arguments, a dict of
            keyword arguments, or the one argument.
        reference_batch: The reference's batch; None: the same, on its device, and cast
            to the dtype of its weights where it has that of the model's.
        loss: Takes a model and the batch and returns the loss; None: the model is
            called, and the loss is in what it returns.
        backward: Also compare gradients.
        names: Regular expressions in module names of `model`, and their replacements.

    Returns:
        The comparison.

    Raises:
        ValueError: If `backward` is True and there is no loss.

    Example:
        >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        >>> compare_live(a, b, torch.ones(1, 2)).first.kind
        'weights'
    """
    from .live import batch_for, compare_models

    check_module(model)
    check_module(reference, "reference")
    its = batch_for(reference, model, batch)
    if reference_batch is not None:
        its = reference_batch
    pair = (model, reference), (batch, its)
    return compare_models(*pair, loss, backward, names_of(names))


def shadow(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    backward: bool = False,
) -> Comparison:
    """Compares a half-precision model with a float32 copy of itself.

    As `compare_live()`; and each layer without submodules is computed once more in
    float32 from the very inputs that it had, so that the error that it makes itself is
    measured (`made`), and not concluded.

    Args:
        model: The model, in half precision at least in part, without DDP or FSDP.
        batch: What it is called with, see `compare_live()`.
        loss: Takes a model and the batch and returns the loss; None: see there.
        backward: Also compare gradients.

    Returns:
        The comparison; the copy is the reference.

    Raises:
        ValueError: If the model is wrapped, sharded, quantized or not initialized.
    """
    from ..precision.again import LocalErrors
    from .live import batch_for, compare_models, float32_copy

    check_module(model)
    copied = float32_copy(model)
    pair = (model, copied), (batch, batch_for(copied, model, batch))
    return compare_models(*pair, loss, backward, {}, LocalErrors(model))
