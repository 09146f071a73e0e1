"""The sentence of a report that says what to try."""

from __future__ import annotations

from .verdict import BadEntry, Verdict

_HALF = ("float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


def advice_for(first: BadEntry, verdict: Verdict) -> str:
    """What to try, by what is bad and where it came from."""
    if first.kind in ("weight", "optimizer_state"):
        return "go back to the last checkpoint whose weights are finite"
    if verdict.origin == "given":
        return (
            "look at the data that made this batch"
            if "batch" in verdict.maker
            else "set the buffer right, or go back to a checkpoint where it is finite"
        )
    lower = "lower the learning rate, or clip the gradients"
    is_of_call = first.kind in ("input", "output")
    if is_of_call and first.signs == "-" and not first.num_nan:
        rule = {f"{first.fqn}:{first.label}": "-inf"}
        return f"if this is meant, as a mask is, allow={rule}; else {lower}"
    if first.kind in ("gradient", "grad_output"):
        if first.dtype == "float16":
            return f"scale the loss by less (torch.amp.GradScaler finds out), {lower}"
        return f"{lower}; look for a division or a logarithm near 0 in what is named"
    if first.dtype in _HALF and first.fqn:
        return (
            "run this module in float32 "
            f"(`overflow_fast.keep_in_fp32(model, [{first.fqn!r}])`) or in bfloat16, "
            "lower the learning rate, or scale down what goes into it"
        )
    return f"{lower}; look for a division or a logarithm near 0 in what is named"
