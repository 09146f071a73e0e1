"""Tries wider dtypes where float16 has overflowed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...core.modules import is_normalization
from ..explanation import Remedy
from .patches import Bfloat16, Float32Modules
from .trials import Attempts, Failure, Trial, Trials


def try_wider_dtypes(failure: Failure, trials: Trials) -> Attempts:
    """Wider dtypes where float16 has overflowed."""
    models = trials.replayer.models
    if not failure.is_half:
        return
    if len(models) == 1:
        ((prefix, model),) = models.items()
        names = _around(model, failure.found.module.removeprefix(prefix))
        yield from _try_modules(model, names[:1], trials)
        yield from _try_up_to_norms(failure, model, prefix, trials)
        yield from _try_modules(model, names[1:], trials)
    remedy = Remedy(*_bfloat16_text(failure, trials))
    yield Trial(remedy, Bfloat16())


def _bfloat16_text(failure: Failure, trials: Trials) -> tuple[str, str]:
    """Describes bfloat16 for autocast, or for the weights and the batch."""
    models = trials.replayer.models.values()
    parameters = [each for model in models for each in model.parameters()]
    if not any(each.dtype == torch.float16 for each in parameters):
        code = "torch.autocast(device_type, dtype=torch.bfloat16)"
        return "bfloat16 for autocast", code
    names = [
        name
        for name, tensor in trials.calls[failure.place].leaves()
        if tensor.dtype == torch.float16
    ]
    casts = [f"{name} = {name}.to(torch.bfloat16)" for name in names]
    text = f"bfloat16 for the model{' and its inputs' * bool(names)}"
    return text, "; ".join(["model.to(torch.bfloat16)", *casts])


def _try_modules(model: torch.nn.Module, names: list[str], trials: Trials) -> Attempts:
    """The smallest module around the operation that helps in float32, by halving."""
    if trials.found_remedy:
        return
    best: list[Remedy] = []  # the smallest so far stands for all
    low, high, place = -1, len(names), len(names) - 1
    while high - low > 1:
        remedy = Remedy(
            f"{names[place]} in float32",
            f'overflow_fast.keep_in_fp32(model, ["{names[place]}"])',
        )
        if (yield Trial(remedy, Float32Modules((names[place],)))):
            trials.remedies = [each for each in trials.remedies if each not in best]
            best, high = trials.remedies[-1:], place
        elif best:
            low = place
        else:
            return
        place = (low + high) // 2


def _try_up_to_norms(
    failure: Failure, model: torch.nn.Module, prefix: str, trials: Trials
) -> Attempts:
    """All from the operation up to normalizations, which make values small again.

    A residual stream stays large beyond the first of them.
    """
    modules = dict(model.named_modules())
    ran = [name.removeprefix(prefix) for name in failure.modules]
    ran = [name for name in ran if name and name in modules]
    norms = [name for name in ran if is_normalization(modules[name])]
    if not norms or trials.found_remedy:
        return
    names = ran[: ran.index(norms[0])]
    for until in ([norms[0]], _patterns(norms, modules)):
        remedy = Remedy(
            f"float32 up to {until[0] if len(until) == 1 else f'{until[0]} ...'}",
            f"overflow_fast.keep_in_fp32(model, {names}, until={until})",
        )
        yield Trial(remedy, Float32Modules(tuple(names), tuple(until)))
        if len(norms) == 1 or trials.found_remedy:
            return


def _patterns(norms: list[str], modules: Mapping[str, torch.nn.Module]) -> list[str]:
    """Patterns of normalizations by the last parts of their names, or the names."""
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in norms)
    alike = [n for n in modules if n.rpartition(".")[2] in lasts]
    if not all(is_normalization(modules[name]) for name in alike):
        return norms
    return [f"*{last}" for last in lasts]


def _around(model: torch.nn.Module, name: str) -> list[str]:
    """A module's name and those of the modules around it that are called."""
    names, modules = [], dict(model.named_modules())
    while name:
        if (
            getattr(type(modules.get(name)), "forward", None)
            is not torch.nn.Module.forward
        ):
            names.append(name)
        name = name.rpartition(".")[0]
    return names
