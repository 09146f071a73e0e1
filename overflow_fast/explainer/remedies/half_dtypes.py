"""Wider dtypes where half precision overflows or rounds: modules in float32, bfloat16.

Modules are those around the operation, or those that run up to a normalization: in a
model whose weights are float16, what a module returns is cast to float16 when it
returns, and a residual stream stays as large as it is up to its normalization. Of both
kinds the one with the fewest parameters is kept that helps.
"""

from __future__ import annotations

import math
from collections.abc import Container, Generator, Iterator, Sequence

import torch
from torch import nn

from ...base.module_kinds import is_normalization
from ...base.modules import is_within, named_modules, named_parameters, parameters_of
from ...guard.report.remedy import Remedy
from ...precision.keep_in_fp32 import has_forward, shortened
from ..halving import Halving
from .failure import Failure
from .patches import Float32Modules, InDtype
from .trials import Attempts, Trial, Trials, Tried


def half_trials(failure: Failure, trials: Trials) -> Attempts:
    """The fewest modules in float32, and bfloat16 where float16 has overflowed."""
    if not failure.half:
        return
    models, at = trials.replayer.models, failure.found.module
    owners = [prefix for prefix in models if at.startswith(prefix)]
    if len(models) == 1 or owners:
        yield from _module_trials(failure, trials, max(owners or models, key=len))
    if not failure.found.is_overflow:
        return
    text, code = _bfloat16_text(failure, trials)
    if text:
        yield Trial(Remedy(text, code), InDtype(torch.bfloat16))
    elif not _is_cast(failure):  # which is none of autocast's
        code = "torch.autocast(device_type, dtype=torch.bfloat16)"
        remedy = Remedy("use bfloat16 for autocast", code)
        yield Trial(remedy, InDtype(torch.bfloat16))


def _module_trials(failure: Failure, trials: Trials, prefix: str) -> Attempts:
    """The fewest modules of a model, up to a normalization or around the operation."""
    model, best = trials.replayer.models[prefix], None

    def num_wide(trial: Trial) -> int:
        return _num_wide(trial.remedy, model)

    for kind in (_spans, _around):
        if trials.found_right and best is None:
            return
        ordered = sorted(kind(failure, model, prefix), key=num_wide)
        most = math.inf if best is None else _num_wide(best.remedy, model)
        fewer = [trial for trial in ordered if num_wide(trial) < most]
        found = yield from _fewest_that_help(fewer, trials)
        if found is not None and best is not None:
            trials.tried.remove(best)
        best = found or best


def _fewest_that_help(
    ordered: Sequence[Trial], trials: Trials
) -> Generator[Trial, bool, Tried | None]:
    """The first of several changes that helps: each one does more than those before.

    The first one alone, else by halving, if the last one helps. What stands for another
    that has helped takes its place.

    Args:
        ordered: The changes.
        trials: Tries them.

    Returns:
        The one that is a remedy; None if neither the first nor the last one is.
    """
    for each in [*ordered[:1], *ordered[1:][-1:]]:
        if (yield each):
            break
    else:
        return None
    best, search = trials.tried[-1], Halving(len(ordered) - 1)
    if each is ordered[0]:
        return best
    for half in search:
        helps = yield ordered[half.stop]
        search.note(helps)
        if helps:
            trials.tried.remove(best)
            best = trials.tried[-1]
    return best


def _num_wide(remedy: Remedy, model: nn.Module) -> int:
    """How many numbers the parameters have that a remedy keeps in float32."""
    wide = (*remedy.modules, *remedy.until)
    return sum(
        parameter.numel()
        for name, parameter in named_parameters(model)
        if any(is_within(name, each) for each in wide)
    )


def _around(failure: Failure, model: nn.Module, prefix: str) -> Iterator[Trial]:
    """Each module around the operation that is called, the innermost first."""
    modules = dict(named_modules(model))
    name = failure.found.module.removeprefix(prefix)
    while name:
        if name in modules and has_forward(modules[name]):
            model_name, which = code_name(prefix)
            code = f'overflow_fast.keep_in_fp32({model_name}, ["{name}"]){which}'
            remedy = Remedy(f"run {name} in float32", code, modules=(name,))
            yield Trial(remedy, Float32Modules(prefix, (name,)))
        name = name.rpartition(".")[0]


def _spans(failure: Failure, model: nn.Module, prefix: str) -> Iterator[Trial]:
    """The modules from the operation on up to each normalization that runs after it.

    It is one beside a module that holds the operation: others have their stream go on
    beside them.
    """
    modules = dict(named_modules(model))
    called = {name for name, module in modules.items() if has_forward(module)}
    order = [name.removeprefix(prefix) for name in failure.modules]
    order = [name for name in order if name and name in modules]
    for until in order[1:]:
        is_beside = is_within(order[0], until.rpartition(".")[0])
        if not (is_beside and is_normalization(modules[until])):
            continue
        names, (model_name, which) = span(order, until, called), code_name(prefix)
        kept = shortened(names, list(modules))
        remedy = Remedy(
            f"run in float32 from {names[0]} up to {until}",
            f"overflow_fast.keep_in_fp32({model_name}, {kept}, until={[until]}){which}",
            modules=tuple(names),
            until=(until,),
        )
        yield Trial(remedy, Float32Modules(prefix, tuple(names), (until,)))


def span(order: Sequence[str], until: str, called: Container[str]) -> list[str]:
    """The modules that hold all that runs up to another one, in order.

    The outermost ones that hold neither that nor the first one.

    Args:
        order: The names of the modules that run, from the first one on.
        until: The one that ends it.
        called: The names of the modules that have a forward.
    """
    found = dict[str, None]()
    for name in order[: order.index(until)]:
        around = [name]
        while around[-1]:
            around.append(around[-1].rpartition(".")[0])
        free = [
            n
            for n in around
            if n in called and not is_within(until, n) and not is_within(order[0], n)
        ]
        found.update(dict.fromkeys(free[-1:]))
    return list(found)


def code_name(prefix: str) -> tuple[str, str]:
    """The name that code has for a model, and a comment that says which of several.

    The program has another name for one of a pipeline's, a dict's or a list's.

    Args:
        prefix: What the names of its modules begin with.
    """
    name = prefix.rstrip(".")
    which = f"  # `{name}` of the guard's models" if name else ""
    return name if name.isidentifier() else "model", which


def _is_cast(failure: Failure) -> bool:
    """True if the program's own cast overflowed."""
    return any(call.name == "to" for call in failure.failing_calls)


def _bfloat16_text(failure: Failure, trials: Trials) -> tuple[str, str]:
    """Describes bfloat16 for the weights and the batch; "" where they are not half."""
    call, models = trials.calls[failure.place], trials.replayer.models
    names = [n for n, tensor in call.leaves() if tensor.dtype == torch.float16]
    parameters = [each for model in models.values() for each in parameters_of(model)]
    is_half = any(each.dtype == torch.float16 for each in parameters)
    is_autocast = any(is_on for _, is_on, _ in call.ambient.autocast)
    if not is_half and (is_autocast or not names):
        return "", ""
    casts = [f"{name} = {name}.to(torch.bfloat16)" for name in names]
    if not is_half:
        return "use bfloat16 for the inputs", "\n".join(casts)
    text = f"use bfloat16 for the model{' and its inputs' * bool(names)}"
    code = list(map(code_name, models))
    return text, "\n".join([*(f"{m}.to(torch.bfloat16){w}" for m, w in code), *casts])
