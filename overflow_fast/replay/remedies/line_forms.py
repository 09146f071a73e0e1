"""Guarded forms of a line: the same expression, finite where it was not."""

from __future__ import annotations

from collections.abc import Iterator

from ..named_op import Op
from .overflow_forms import Form, in_float32, of_overflow
from .written import Written, atom

# What is added below a root or a logarithm, by dtype.
_EPS = {"float64": "1e-12", "float32": "1e-8", "bfloat16": "1e-6", "float16": "1e-4"}
_WIDE_EPS = {
    "float64": "1e-7",
    "float32": "1e-6",
    "bfloat16": "1e-2",
    "float16": "1e-3",
}
_LOWEST = {"float16": "-1e4"}
_ROOTS = {"sqrt", "rsqrt"}
_LOGS = {"log", "log2", "log10"}
_NORMS = {"norm", "vector_norm"}
_ATTENTION = "scaled_dot_product_attention"
_MEANS = ("mean", "loss", "cross_entropy", "median")  # in the names of operations


def forms_of(written: Written, op: Op, cause: str) -> Iterator[Form]:
    """Yields guarded forms of an expression, the mildest first.

    Args:
        written: The expression.
        op: The operation that failed in it.
        cause: Why it failed: see `Explanation.cause`.
    """
    dtype = op.inputs[0].dtype if op.inputs else "float32"
    if not written.name or not written.operands or dtype not in _EPS:
        return
    if cause == "range overflow":
        yield from of_overflow(written, dtype)
        return
    if cause == "empty reduction" or written.name == "ctc_loss":
        yield from _of_nothing(written, op.name)
    for makes in (_of_root, _of_log, _of_inverse, _of_norm, _of_softmax):
        yield from makes(written, dtype)
    yield from _of_number(written, op, dtype)
    has_inf = "inf" in written.text or any(each.num_inf for each in op.inputs)
    if has_inf and not written.is_in_place:
        yield from _of_infs(written, op, dtype)
    if dtype == "float16" and written.name in _NORMS | {"std", "var"}:
        yield in_float32(written)


def _of_root(written: Written, dtype: str) -> Iterator[Form]:
    eps = _EPS[dtype]
    if written.name in _ROOTS:
        yield Form(f"{eps} inside the {written.name}", written.with_sum(eps))
    if written.name == "pow":
        yield Form(f"{eps} below the power", written.with_sum(eps))
    if written.name in _ROOTS | {"pow"}:
        yield Form(
            f"at least {eps} below the {'power' if written.name == 'pow' else 'root'}",
            written.with_clamp(f"min={eps}"),
        )


def _of_log(written: Written, dtype: str) -> Iterator[Form]:
    eps, wide = _EPS[dtype], _WIDE_EPS[dtype]
    if written.name in _LOGS:
        yield Form(
            f"the logarithm of at least {eps}",
            written.with_clamp(f"min={eps}"),
        )
    if written.name == "log1p":
        yield Form(
            f"the logarithm of at least {wide}",
            written.with_clamp(f"min={wide} - 1"),
        )
    if written.name in (
        "acos",
        "asin",
        "arccos",
        "arcsin",
        "atanh",
        "arctanh",
        "erfinv",
    ):
        yield Form(
            f"an argument of at most 1 - {wide}",
            written.with_clamp(f"{wide} - 1, 1 - {wide}"),
        )
    if written.name in ("logit",) and not written.has_keyword("eps"):
        yield Form(f"eps={wide}", written.with_keyword("eps", wide))
    if written.name in ("acosh", "arccosh"):
        yield Form(
            f"an argument of at least 1 + {wide}",
            written.with_clamp(f"min=1 + {wide}"),
        )


def _of_number(written: Written, op: Op, dtype: str) -> Iterator[Form]:
    """Where a number of Python is what it divides by."""
    if written.name == "div" and len(op.inputs) < len(written.operands) == 2:
        by = f"({written.operands[1]} or {_EPS[dtype]})"
        yield Form(f"{_EPS[dtype]} for 0", written.with_operands(None, by))


def _of_inverse(written: Written, dtype: str) -> Iterator[Form]:
    eps = _EPS[dtype]
    if written.name in ("div", "true_divide", "divide") and len(written.operands) == 2:
        by = written.operands[1]
        safe = f"torch.where({by} == 0, {eps}, {by})"
        yield Form(f"{eps} where it divides by 0", written.with_operands(None, safe))
        yield Form(f"{eps} below", written.with_operands(None, f"({by} + {eps})"))
    if written.name == "reciprocal" and not written.is_in_place:
        of = written.operands[0]
        safe = f"torch.where({of} == 0, {eps}, {of})"
        yield Form(f"{eps} where it divides by 0", written.with_operands(safe))


def _of_norm(written: Written, dtype: str) -> Iterator[Form]:
    eps, first = _EPS[dtype], written.operands[0]
    plain = [p for p in (written.operands[1:2]) if p not in ("2", "2.0")]
    is_euclidean = not plain and not written.has_keyword("p", "ord")
    if written.name in _NORMS and is_euclidean:
        rest = ", ".join(
            f"{key}={written.keyword(key)}"
            for key in ("dim", "keepdim")
            if written.has_keyword(key)
        )
        yield Form(
            f"{eps} inside the root of the norm",
            f"({first}.square().sum({rest}) + {eps}).sqrt()",
        )
    if written.name == "std":
        yield Form(
            f"{eps} inside the root of the deviation",
            f"({first}.var({written.argument}) + {eps}).sqrt()",
        )
    if written.name in (
        "normalize",
        "cdist",
        "cosine_similarity",
        "pairwise_distance",
        "dist",
        "norm",
        "vector_norm",
        "atan2",
        "arctan2",
    ):
        yield Form(f"{eps} added", written.with_operands(f"({first} + {eps})"))


def _of_softmax(written: Written, dtype: str) -> Iterator[Form]:
    lowest = _LOWEST.get(dtype, "-1e9")
    if written.name in ("softmax", "log_softmax", "logsumexp"):
        yield Form(
            f"scores of at least {lowest}",
            written.with_operands(f"{written.operands[0]}.clamp(min={lowest})"),
        )
    if written.name == _ATTENTION:
        mask = written.keyword("attn_mask")
        if not mask and len(written.operands) > 3:
            return
        if mask:
            yield Form(
                f"a mask of at least {lowest}",
                written.with_keyword("attn_mask", f"{mask}.clamp(min={lowest})"),
            )
            yield Form(
                "rows without a key see all",
                written.with_keyword(
                    "attn_mask", f"{mask} | ~{mask}.any(-1, keepdim=True)"
                ),
            )


def _of_nothing(written: Written, op: str) -> Iterator[Form]:
    first = written.operands[0]
    if written.name in ("div", "true_divide", "divide") and len(written.operands) == 2:
        by = written.operands[1]
        yield Form(
            "a count of at least 1", written.with_operands(None, f"{by}.clamp(min=1)")
        )
    is_free = not written.has_keyword("unbiased", "correction")
    if written.name == "var":
        is_old = written.has_keyword("unbiased")
        keyword = ("unbiased", "False") if is_old else ("correction", "0")
        yield Form("no correction", written.with_keyword(*keyword))
    if written.name == "std" and is_free:
        rest = f"{written.argument}, " * bool(written.argument)
        yield Form(
            "no correction, and 1e-8 inside the root",
            f"({first}.var({rest}correction=0) + 1e-8).sqrt()",
        )
    if written.name == "ctc_loss":
        yield Form("zero_infinity=True", written.with_keyword("zero_infinity", "True"))
    if not written.is_in_place and any(base in op for base in _MEANS):
        yield Form("0 where there is nothing", f"torch.nan_to_num({written.text})")


def _of_infs(written: Written, op: Op, dtype: str) -> Iterator[Form]:
    """Where infs that are meant, as of masks, meet in a sum or a product with 0."""
    lowest = _LOWEST.get(dtype, "-1e9")
    if written.name == "mul" and len(op.inputs) == len(written.operands) == 2:
        for i, each in enumerate(op.inputs):
            low = f"{atom(written.operands[i])}.clamp(min={lowest})"
            operands = [low if i == place else None for place in range(2)]
            if each.num_inf and not written.is_constant(i):
                yield Form(
                    f"a factor of at least {lowest}", written.with_operands(*operands)
                )
    if written.name in ("add", "sub", "mul", "sum", "matmul", "bmm"):
        yield Form("0 for inf - inf and 0 * inf", f"torch.nan_to_num({written.text})")
