"""Modules in float32 from an overflow on to where values fit again.

In a model whose weights are float16, what a module returns is cast to float16 when it
returns, and a residual stream stays as large as it is up to its normalization.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from ...base.modules import is_normalization, is_within, named_modules
from ...guard.report.remedy import Remedy
from .keep_in_fp32 import has_forward, shortened
from .patches import Float32Modules
from .trials import Attempts, Failure, Trial, Trials, least_that_helps


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


def try_spans(failure: Failure, trials: Trials, prefix: str, model: str) -> Attempts:
    """Modules in float32 up to a normalization: the nearest that does, by halving.

    Args:
        failure: The failure.
        trials: Tries them.
        prefix: What the names of the model's modules begin with.
        model: What the code calls the model.
    """
    modules = dict(named_modules(trials.replayer.models[prefix]))
    called = {name for name, module in modules.items() if has_forward(module)}
    order = [name.removeprefix(prefix) for name in failure.modules]
    order = [name for name in order if name and name in modules]
    norms = [name for name in order[1:] if is_normalization(modules[name])]

    def trial_of(num: int) -> Trial:
        until = norms[num - 1]
        names = span(order, until, called)
        kept = shortened(names, list(modules))
        remedy = Remedy(
            f"run in float32 from {names[0]} up to {until}",
            f"overflow_fast.keep_in_fp32({model}, {kept}, until={[until]})",
            modules=tuple(names),
            until=(until,),
        )
        return Trial(remedy, Float32Modules(prefix, tuple(names), (until,)))

    yield from least_that_helps(len(norms), trial_of, trials)
