"""Forms of an expression that keep it in range."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .written import Written, atom

# The largest arguments of exp, by dtype; a loss of exp(80) is finite and of no use.
_LOG_MAX = {"float64": (80, 700), "float16": (10, 5)}
_EXPS = {"exp", "expm1", "sinh", "cosh", "exp2", "poisson_nll_loss"}
_OF_TWO = {"matmul", "bmm", "mm", "mul", "add", "sub", "dot", "linear", "mse_loss"}
_PRODUCTS = {
    "matmul",
    "bmm",
    "mm",
    "mul",
    "add",
    "sub",
    "sum",
    "pow",
    "square",
    "cumsum",
    "dot",
    "norm",
    "vector_norm",
    "mean",
    "prod",
    "var",
    "std",
    "mse_loss",
    "linear",
}


@dataclass(frozen=True)
class Form:
    """Another way to write an expression.

    Attributes:
        text: What it does, such as "1e-8 inside the sqrt".
        code: The expression.
    """

    text: str
    code: str


def of_overflow(written: Written, dtype: str) -> Iterator[Form]:
    """Yields forms in which a value stays in range.

    Args:
        written: The expression.
        dtype: The dtype of its inputs.
    """
    if written.name in _EXPS:
        for largest in _LOG_MAX.get(dtype, (20, 80)):
            yield Form(
                f"an argument of at most {largest}",
                written.with_clamp(f"max={largest}"),
            )
    if dtype == "float16" and written.name in _PRODUCTS and not written.is_in_place:
        yield in_float32(written)


def in_float32(written: Written) -> Form:
    """The expression with its operands in float32."""
    num = 2 if written.name in _OF_TWO else 1
    wide = [
        None if written.is_constant(i) else f"{atom(each)}.float()"
        for i, each in enumerate(written.operands[:num])
    ]
    return Form("in float32", written.with_operands(*wide))
