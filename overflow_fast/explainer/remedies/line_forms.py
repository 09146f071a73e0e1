"""Guarded forms of a line: the same expression, finite where it was not."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...guard.report.explanation import OVERFLOWS, Explanation, Op, Remedy
from ..op_rows import Row
from ..users_lines import Frames, span_of
from .exact_forms import exact_forms, functional_name, twice
from .line_edit import CodePlace, NotEditableError, edited_code
from .patches import LinePatch
from .source_rewrites import (
    PRODUCTS,
    Edit,
    SourceFile,
    Written,
    atom,
    following,
    later_softmax,
    loads,
    outermost,
    softmax_around,
    statement_of,
    target_of,
)
from .trials import (
    AppliedPatches,
    Attempts,
    Failure,
    Trial,
    Trials,
    edited_remedy,
)

# Forms of an expression that keep it in range.


# The largest arguments of exp, by dtype; a loss of exp(80) is finite and of no use.
_LOG_MAX = {"float64": (80, 700), "float16": (10, 5)}
_EXPS = {"exp", "expm1", "sinh", "cosh", "exp2", "poisson_nll_loss"}
_BOTH_SIDES = {"sinh", "cosh"}  # large for arguments of either sign
_QUOTIENTS = {"div", "true_divide", "divide"}
_OF_TWO = _QUOTIENTS | {"matmul", "bmm", "mm", "mul", "add", "sub", "dot", "linear"}
_OF_TWO |= {"mse_loss"}
_PRODUCTS = {
    *_QUOTIENTS,
    "reciprocal",
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
    "cross_entropy",
    "nll_loss",
    "kl_div",
    "log_softmax",
    "logsumexp",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy_with_logits",
}


@dataclass(frozen=True)
class Form:
    """Another way to write an expression.

    Attributes:
        text: What it does, such as "add 1e-8 inside the sqrt".
        code: The expression.
    """

    text: str
    code: str


def overflow_forms(written: Written, op: Op, dtype: str) -> Iterator[Form]:
    """Yields forms in which a value stays in range.

    Args:
        written: The expression.
        op: The operation that overflowed in it.
        dtype: The dtype of its inputs.
    """
    if written.name in _EXPS:
        for largest in _LOG_MAX.get(dtype, (20, 80)):
            if written.name in _BOTH_SIDES:
                text = f"clamp the argument between -{largest} and {largest}"
                yield Form(text, written.with_clamp(f"-{largest}, {largest}"))
            else:
                text = f"clamp the argument to {largest}"
                yield Form(text, written.with_clamp(f"max={largest}"))
    if dtype == "float16" and written.name in _PRODUCTS and not written.is_in_place:
        yield from float32_forms(written, op)
    if written.name in _QUOTIENTS and len(written.operands) == 2:
        yield _larger_divisor(written, dtype)


def float32_forms(written: Written, op: Op) -> Iterator[Form]:
    """Yields the expression with its operands in float32."""
    num = 2 if written.name in _OF_TWO else 1
    for code in _in_float32_of(written, range(min(num, len(written.operands))), op):
        yield Form("compute it in float32", code)


def _in_float32_of(
    written: Written, places: Iterable[int], op: Op, more: Sequence[int] = ()
) -> Iterator[str]:
    """Yields an expression with operands in float32; a number has no dtype to change.

    Args:
        written: The expression.
        places: Those operands. Of two of which only one is a tensor, and it is not
            seen which, each is tried.
        op: The operation.
        more: Operands that are cast with each of them.
    """
    wide = [place for place in places if not written.is_constant(place)]
    is_open = len(wide) == 2 and len(op.inputs) == 1
    for some in [[place] for place in wide] if is_open else [wide]:
        yield written.with_operands(
            *(
                f"{atom(text)}.float()" if i in (*some, *more) else None
                for i, text in enumerate(written.operands)
            )
        )


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


def forms_of(
    written: Written, op: Op, cause: str, by_number: bool = False
) -> Iterator[Form]:
    """Yields guarded forms of an expression, the mildest first.

    Args:
        written: The expression.
        op: The operation that failed in it.
        cause: Why it failed: see `Explanation.cause`.
        by_number: Whether it divides by a number of Python.
    """
    dtype = op.inputs[0].dtype if op.inputs else "float32"
    if not written.name or not written.operands or dtype not in _EPS:
        return
    if cause in OVERFLOWS:
        yield from overflow_forms(written, op, dtype)
        return
    if written.name in _MEAN_LOSSES:
        yield from _mean_forms(written)
    yield from _loss_module_forms(written, op)
    if cause == "empty reduction" or written.name == "ctc_loss":
        yield from _empty_forms(written, op.name)
    if by_number and written.name in _QUOTIENTS and len(written.operands) == 2:
        by = f"({written.operands[1]} or {_EPS[dtype]})"
        yield Form(
            f"divide by {_EPS[dtype]} in place of 0", written.with_operands(None, by)
        )
        return
    for makes in (
        _root_forms,
        _log_forms,
        _inverse_forms,
        _norm_forms,
        _matrix_forms,
        _shifted_softmax_forms,
    ):
        yield from makes(written, dtype)
    has_inf = "inf" in written.text or any(each.num_inf for each in op.inputs)
    if has_inf and not written.is_in_place:
        yield from _inf_forms(written, op, dtype)
    if dtype == "float16" and written.name in _NORMS | {"std", "var"}:
        yield from float32_forms(written, op)


def _forms_at(row: Row, written: Written, op: Op, cause: str) -> Iterator[Form]:
    """The forms of the expression that a row of a replay's table is of."""
    by_number = row.details is not None and row.details.divides_by_number
    return forms_of(written, op, cause, by_number)


def _root_forms(written: Written, dtype: str) -> Iterator[Form]:
    eps = _EPS[dtype]
    if written.name in _ROOTS:
        yield Form(f"add {eps} inside the {written.name}", written.with_sum(eps))
    if written.name == "pow":
        yield Form(f"add {eps} to the base of the power", written.with_sum(eps))
    if written.name in _ROOTS | {"pow"}:
        what = "base" if written.name == "pow" else "argument"
        yield Form(
            f"clamp the {what} to at least {eps}",
            written.with_clamp(f"min={eps}"),
        )


def _log_forms(written: Written, dtype: str) -> Iterator[Form]:
    eps, wide = _EPS[dtype], _WIDE_EPS[dtype]
    if written.name == "poisson_nll_loss":
        yield Form("clamp the rate to at least 0", written.with_clamp("min=0"))
    if written.name in _LOGS:
        yield Form(
            f"clamp the logarithm's argument to at least {eps}",
            written.with_clamp(f"min={eps}"),
        )
    if written.name == "log1p":
        yield Form(
            f"clamp the logarithm's argument to at least {wide}",
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
            f"clamp the argument to a magnitude of 1 - {wide}",
            written.with_clamp(f"{wide} - 1, 1 - {wide}"),
        )
    if written.name in ("logit",) and not written.has_keyword("eps"):
        yield Form(f"pass eps={wide}", written.with_keyword("eps", wide))
    if written.name in ("acosh", "arccosh"):
        yield Form(
            f"clamp the argument to at least 1 + {wide}",
            written.with_clamp(f"min=1 + {wide}"),
        )


def _inverse_forms(written: Written, dtype: str) -> Iterator[Form]:
    eps = _EPS[dtype]
    if written.name in _QUOTIENTS and len(written.operands) == 2:
        by = written.operands[1]
        safe = f"torch.where({by} == 0, {eps}, {by})"
        yield Form(
            f"divide by {eps} where the divisor is 0", written.with_operands(None, safe)
        )
        yield _larger_divisor(written, dtype)
    if written.name == "reciprocal" and not written.is_in_place:
        of = written.operands[0]
        safe = f"torch.where({of} == 0, {eps}, {of})"
        yield Form(
            f"divide by {eps} where the divisor is 0", written.with_operands(safe)
        )


def _larger_divisor(written: Written, dtype: str) -> Form:
    eps, by = _EPS[dtype], written.operands[1]
    text = f"add {eps} to the divisor"
    return Form(text, written.with_operands(None, f"({by} + {eps})"))


def _norm_forms(written: Written, dtype: str) -> Iterator[Form]:
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
            f"add {eps} inside the root of the norm",
            f"({first}.square().sum({rest}) + {eps}).sqrt()",
        )
    if written.name == "std":
        yield Form(
            f"add {eps} inside the root of the deviation",
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
        yield Form(
            f"add {eps} to the input", written.with_operands(f"({first} + {eps})")
        )


_JITTER = {"float64": "1e-9", "bfloat16": "1e-2", "float16": "1e-3"}
_OF_SINGULAR = {"logdet", "slogdet", "det", "inverse", "inv", "cholesky", "cholesky_ex"}
_OF_EQUAL = {"eigh", "svd", "eig"}  # their gradients divide by differences


def _matrix_forms(written: Written, dtype: str) -> Iterator[Form]:
    """A matrix that is not singular, or has no two equal values."""
    if written.is_in_place or written.name not in _OF_SINGULAR | _OF_EQUAL:
        return
    first, again = twice(written.operands[0])
    like = f"dtype={again}.dtype, device={again}.device"
    if written.name in _OF_SINGULAR:
        eps = _JITTER.get(dtype, "1e-6")
        text = f"add {eps} to the diagonal"
        added = f"{eps} * torch.eye({again}.shape[-1], {like})"
    else:
        text = "add numbers from 0 to 1e-3 to the diagonal, which no two values share"
        steps = f"torch.linspace(0, 1e-3, {again}.shape[-1], {like})"
        added = f"torch.diag({steps})"
    yield Form(text, written.with_operands(f"({first} + {added})"))


def _shifted_softmax_forms(written: Written, dtype: str) -> Iterator[Form]:
    lowest = _LOWEST.get(dtype, "-1e9")
    if written.name in ("softmax", "log_softmax", "logsumexp"):
        yield Form(
            f"clamp the scores to at least {lowest}",
            written.with_operands(f"{written.operands[0]}.clamp(min={lowest})"),
        )
    if written.name == _ATTENTION:
        mask = written.keyword("attn_mask")
        if not mask and len(written.operands) > 3:
            return
        if mask:
            yield Form(
                f"clamp the mask to at least {lowest}",
                written.with_keyword("attn_mask", f"{mask}.clamp(min={lowest})"),
            )
            yield Form(
                "let rows without a key see all keys",
                written.with_keyword(
                    "attn_mask", f"{mask} | ~{mask}.any(-1, keepdim=True)"
                ),
            )


def _empty_forms(written: Written, op: str) -> Iterator[Form]:
    first = written.operands[0]
    if written.name in _QUOTIENTS and len(written.operands) == 2:
        by = written.operands[1]
        yield Form(
            "divide by a count of at least 1",
            written.with_operands(None, f"{atom(by)}.clamp(min=1)"),
        )
    is_free = not written.has_keyword("unbiased", "correction")
    if written.name in ("var", "var_mean"):
        is_old = written.has_keyword("unbiased")
        keyword = ("unbiased", "False") if is_old else ("correction", "0")
        yield Form(
            "use no correction, which divides by n", written.with_keyword(*keyword)
        )
    if written.name == "std" and is_free:
        rest = f"{written.argument}, " * bool(written.argument)
        yield Form(
            "use no correction, and add 1e-8 inside the root",
            f"({first}.var({rest}correction=0) + 1e-8).sqrt()",
        )
    if written.name == "ctc_loss":
        yield Form(
            "pass zero_infinity=True", written.with_keyword("zero_infinity", "True")
        )
    is_one = not written.name.endswith("_mean")  # which returns two tensors
    if is_one and not written.is_in_place and any(base in op for base in _MEANS):
        yield Form(
            "return 0 where there is nothing to average",
            f"torch.nan_to_num({written.text})",
        )


_MEAN_LOSSES = {"cross_entropy", "nll_loss"}


def _mean_forms(written: Written) -> Iterator[Form]:
    """The sum of a loss, divided by a count that is not 0."""
    if len(written.operands) != 2 or written.has_keyword("reduction"):
        return
    total = written.with_keyword("reduction", '"sum"')
    weight = written.keyword("weight")
    ignored = written.keyword("ignore_index") or "-100"
    yield _mean_of(total, written.operands[1], weight, ignored)


def _mean_of(total: str, labels: str, weight: str, ignored: str) -> Form:
    """A sum divided by that of the labels' weights, or by how many labels count."""
    if weight:
        text = "divide the sum by a sum of weights of at least 1e-8"
        counted = f"{labels}[{labels} != {ignored}]"
        return Form(text, f"{total} / {atom(weight)}[{counted}].sum().clamp(min=1e-8)")
    text = "divide the sum by a count of at least 1"
    return Form(text, f"{total} / ({labels} != {ignored}).sum().clamp(min=1)")


def _loss_module_forms(written: Written, op: Op) -> Iterator[Form]:
    """The function of a loss that is called as a module, with its settings."""
    is_ctc = "ctc_loss" in op.name
    function = functional_name(
        written.source, "ctc_loss" if is_ctc else "cross_entropy"
    )
    own, given = written.function, written.arguments
    is_module = written.name not in {*_MEAN_LOSSES, "ctc_loss"} and bool(own)
    if not is_module or not function or written.has_any_keyword:
        return
    if is_ctc and len(given) == 4:
        own_settings = f"blank={own}.blank, reduction={own}.reduction"
        code = f"{function}({', '.join(given)}, {own_settings}, zero_infinity=True)"
        yield Form("pass zero_infinity=True", code)
    elif op.name.startswith("aten.nll_loss") and len(given) == 2:
        # What is not a CrossEntropyLoss lacks one of these: nothing is tried then.
        settings = [f"{key}={own}.{key}" for key in ("ignore_index", "label_smoothing")]
        weight = f"{own}.weight" if len(op.inputs) > 1 else ""
        settings += [f"weight={weight}"] * bool(weight)
        total = f'{function}({", ".join([*given, *settings])}, reduction="sum")'
        yield _mean_of(total, given[1], weight, f"{own}.ignore_index")


def _inf_forms(written: Written, op: Op, dtype: str) -> Iterator[Form]:
    """Where infs that are meant, as of masks, meet in a sum or a product with 0."""
    lowest = _LOWEST.get(dtype, "-1e9")
    if written.name == "mul" and len(op.inputs) == len(written.operands) == 2:
        for i, each in enumerate(op.inputs):
            low = f"{atom(written.operands[i])}.clamp(min={lowest})"
            operands = [low if i == place else None for place in range(2)]
            if each.num_inf and not written.is_constant(i):
                yield Form(
                    f"clamp the factor to at least {lowest}",
                    written.with_operands(*operands),
                )
    if written.name in ("add", "sub", "mul", "sum", "matmul", "bmm"):
        yield Form(
            "replace the nan of inf - inf and 0 * inf by 0",
            f"torch.nan_to_num({written.text})",
        )


# Tries guarded forms of the line of an operation.


_MAX_FORMS = 4


def line_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """Guarded forms of the expression that calls the operation."""
    op, row = failure.found.op, failure.row
    if op is None or row is None:
        return
    source, node = expression_of(row, trials.applied)
    if source is None or node is None:
        return
    forms = _forms_at(row, Written(source, node), op, failure.found.cause)
    for form in itertools.islice(forms, _MAX_FORMS):
        edits = [Edit(node, form.code)]
        yield _trial_of_edits(form.text, edits, source, row, trials)


def empty_row_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """A logsumexp of nothing but a mask's -inf, which then counts as 0.

    A mask that is less deep would make a loss that is finite and huge.
    """
    row = failure.row
    source, node = (None, None) if row is None else expression_of(row, trials.applied)
    if row is None or source is None or node is None:
        return
    written = Written(source, node)
    if written.name == "logsumexp":
        first, again = twice(written.text)
        code = f'{first}.masked_fill({again} == float("-inf"), 0)'
        text = "take 0 where all scores are masked"
        yield _trial_of_edits(text, [Edit(node, code)], source, row, trials)


def loss_in_float32(failure: Failure, trials: Trials) -> Attempts:
    """A function of the loss that overflows in float16, given float32 instead."""
    row = failure.row
    if row is None or not failure.is_half or len(row.frames) < 2:
        return
    caller = row.frames[1:]
    source, span = trials.applied.source(caller[0][0].co_filename), span_of(caller)
    node = None if span is None else source.node_at(span)
    if not isinstance(node, ast.Call):
        return
    given = [*node.args, *(each.value for each in node.keywords)]
    texts = [(e, atom(source.text_of(e))) for e in given if isinstance(e, _TENSORS)]
    # A module has a float(), too, which would change it, and no clone().
    wide = [Edit(e, f"{text}.float()", f"{text}.clone().float()") for e, text in texts]
    if wide:
        text = "compute the loss in float32"
        yield _trial_of_edits(text, wide, source, row, trials, caller)


_TENSORS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.BinOp)


def exact_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """Forms that are the same in exact arithmetic, and stay in range."""
    seen: set[str] = set()
    for row in filter(None, (failure.row, failure.lost)):
        source, node = expression_of(row, trials.applied)
        if source is None or node is None:
            continue
        for text, edits in exact_forms(source, node):
            code = source.edited(edits).text
            if code not in seen:
                seen.add(code)
                yield _trial_of_edits(text, edits, source, row, trials)


def lost_value_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """A lower bound of the expression whose result, in its dtype, became 0."""
    row, op = failure.lost, failure.found.op
    if row is None or op is None:
        return
    source, node = expression_of(row, trials.applied)
    if source is None or node is None:
        return
    written = Written(source, node)
    dtype = op.inputs[0].dtype if op.inputs else "float32"
    if dtype in _EPS and written.text and not isinstance(node, ast.AugAssign):
        code = f"{atom(written.text)}.clamp(min={_EPS[dtype]})"
        text = f"clamp the result to at least {_EPS[dtype]}"
        if failure.found.cause == "underflow":
            yield _trial_of_edits(text, [Edit(node, code)], source, row, trials)


# What a mask of -inf is written as; the number that stands for it in dtypes.
_INFS = {
    *('float("-inf")', "float('-inf')", '-float("inf")', "-float('inf')"),
    *("-torch.inf", "-math.inf", "-np.inf", "-numpy.inf", "-inf"),
    *('float("-Inf")', "float('-Inf')", '-float("Inf")', "-float('Inf')"),
}


def mask_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """The mask whose infs meet, made of a large number instead."""
    row, op = failure.mask, failure.found.op
    if row is None or op is None or not op.inputs:
        return
    source, node = _statement_at(row, trials)
    if source is None or node is None:
        return
    lowest = _LOWEST.get(op.inputs[0].dtype, "-1e9")
    infs = [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.expr) and source.text_of(each) in _INFS
    ]
    if len(infs) == 1:
        edits = [Edit(infs[0], lowest)]
        text = f"mask with {lowest} instead of -inf"
        yield _trial_of_edits(text, edits, source, row, trials)


def _statement_at(row: Row, trials: Trials) -> tuple[SourceFile | None, ast.AST | None]:
    """The file and the statement that an operation was called in."""
    if not row.frames:
        return None, None
    code, line, _ = row.frames[0]
    source = trials.applied.source(code.co_filename)
    return source, source.statement_at(line)


def expression_of(
    row: Row, applied: AppliedPatches
) -> tuple[SourceFile | None, ast.AST | None]:
    """The file and the expression that called an operation, or None."""
    if not row.frames:
        return None, None
    source, span = applied.source(row.frames[0][0].co_filename), span_of(row.frames)
    return source, None if span is None else source.node_at(span)


def _trial_of_edits(
    text: str,
    edits: Sequence[Edit],
    source: SourceFile,
    row: Row,
    trials: Trials,
    frames: Frames = (),
) -> Trial:
    """The trial of edits of the code that called an operation.

    Args:
        text: The edits in words.
        edits: The edits.
        source: The file that they are of.
        row: The operation.
        trials: The trials.
        frames: The code that is edited; () for that of the operation.

    Raises:
        NotEditableError: If the file is not what runs.
    """
    after = source.edited(edits)
    place = CodePlace.of((frames or row.frames)[0][0])
    patch = trials.applied.line_patch(LinePatch((place,), source.to_run(edits)))
    texts = tuple(t for edit in edits for t in (source.text_of(edit.node), edit.text))
    return Trial(edited_remedy(text, edits, after), patch, after, texts)


# Tries guarded forms of a line of an optimizer's own step.


_GIVEN = " (with gradients of 0)"


def update_remedies(
    row: Row, found: Explanation, is_finite_now: Callable[[], bool]
) -> Iterator[Remedy]:
    """Tries other forms of the line of an operation in an optimizer's step.

    Args:
        row: The operation.
        found: Its explanation.
        is_finite_now: Makes the step again on a copy, with gradients of 0; tells
            whether the weight is finite then.
    """
    source, node = expression_of(row, AppliedPatches())
    if found.op is None or source is None or node is None:
        return
    forms = _forms_at(row, Written(source, node), found.op, found.cause)
    for form in itertools.islice(forms, _MAX_FORMS):
        edits = [Edit(node, form.code)]
        try:
            place = CodePlace.of(row.frames[0][0])
            with edited_code((place,), source.to_run(edits)):
                is_finite = is_finite_now()
        except NotEditableError as error:
            found.notes.append(f"A change of the line was not tried: {error}.")
            return
        except Exception:
            is_finite = False
        remedy = edited_remedy(f"{form.text}{_GIVEN}", edits, source.edited(edits))
        yield replace(remedy, is_finite=is_finite)


# Where a product is divided or multiplied by a number after it.


_SHAPES = {
    *("transpose", "permute", "view", "reshape", "contiguous", "unsqueeze", "squeeze"),
    *("flatten", "unflatten", "swapaxes"),
}
_BY = {"div": "/", "mul": "*", "div_": "/", "mul_": "*"}
_OPERATORS: dict[type[ast.operator], str] = {ast.Div: "/", ast.Mult: "*"}
_NOT_TWICE = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)
_SIMPLE = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Constant)


@dataclass(frozen=True)
class Scaling:
    """A division or multiplication by a number.

    Attributes:
        whole: The expression or statement.
        scaled: What it scales.
        by: The operator and the number, such as "/ math.sqrt(d)".
        checked: The same, which fails where it is no number.
        rest: The text that is left of `whole` without it; None where `scaled` is.
    """

    whole: ast.AST
    scaled: ast.AST
    by: str
    checked: str
    rest: str | None = None


def scalings_of(source: SourceFile, node: ast.AST) -> Iterator[Scaling]:
    """Yields how an expression is scaled: in its own statement, or in the next."""
    same = _shaped(source, node)
    whole = next(source.around(same), None)
    found = None if whole is None else _scaling(source, whole, same, None)
    if found is not None:
        yield found
        return
    statement = statement_of(source, node)
    name = target_of(statement, same)
    if statement is None or not name:
        return
    for after in following(source, statement)[:1]:
        scaling = _in_next(source, after, name)
        if scaling is not None and _is_read_once(source, after, name):
            yield scaling


def _shaped(source: SourceFile, node: ast.AST) -> ast.AST:
    """The expression with methods that change no value, such as `.transpose()`."""
    around = list(source.around(node))
    for function, call in zip(around[::2], around[1::2], strict=False):
        if not isinstance(function, ast.Attribute) or not isinstance(call, ast.Call):
            break
        if call.func is not function or function.attr not in _SHAPES:
            break
        node = call
    return node


def _in_next(source: SourceFile, after: ast.stmt, name: str) -> Scaling | None:
    """Reads by what the next statement scales a variable."""
    if isinstance(after, ast.AugAssign):
        target = after.target
        if isinstance(target, ast.Name) and target.id == name:
            symbol = _OPERATORS.get(type(after.op), "")
            return _made(source, after, target, symbol, after.value, "pass")
        return None
    for read in loads(after, {name})[:1]:
        whole = next(source.around(read), None)
        if isinstance(whole, ast.Attribute):
            whole = next(source.around(whole), None)
        return None if whole is None else _scaling(source, whole, read, name)
    return None


def _is_read_once(source: SourceFile, after: ast.stmt, name: str) -> bool:
    """True if nothing but the scaling sees the value before it."""
    if isinstance(after, ast.AugAssign):
        return True
    if len(loads(after, {name})) != 1:
        return False
    value = getattr(after, "value", None)
    if isinstance(after, ast.Expr) or (value and target_of(after, value) == name):
        return True
    return not any(loads(each, {name}) for each in following(source, after))


def _scaling(
    source: SourceFile, whole: ast.AST, scaled: ast.AST, rest: str | None
) -> Scaling | None:
    """Reads by what an expression scales another one; None if it does not."""
    if isinstance(whole, ast.BinOp):
        symbol = _OPERATORS.get(type(whole.op), "")
        other = whole.right if whole.left is scaled else whole.left
        if whole.left is not scaled and symbol == "/":
            return None
        return _made(source, whole, scaled, symbol, other, rest)
    calls = [each for each in source.around(scaled)][1:2]
    call = calls[0] if calls else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        symbol = _BY.get(call.func.attr, "")
        if call.func.value is scaled and len(call.args) == 1 and not call.keywords:
            return _made(source, call, scaled, symbol, call.args[0], rest)
    return None


def _made(
    source: SourceFile,
    whole: ast.AST,
    scaled: ast.AST,
    symbol: str,
    number: ast.expr,
    rest: str | None,
) -> Scaling | None:
    names = {scaled.id} if isinstance(scaled, ast.Name) else set()
    is_odd = any(isinstance(each, _NOT_TWICE) for each in ast.walk(number))
    if not symbol or is_odd or loads(number, names):
        return None
    text = source.text_of(number)
    text = text if isinstance(number, _SIMPLE) else f"({text})"
    checked = f'({text} if not getattr({text}, "ndim", 0) else None)'
    return Scaling(whole, scaled, f"{symbol} {text}", f"{symbol} {checked}", rest)


# Other forms of a product that overflows: scaled before it, or in float32.


# Where the factors of a product stand among the operands; a term that is added, too.
_TERMS = {"addmm", "baddbmm", "addbmm"}
_SECOND = _TERMS | {"einsum"}
_FACTORS = {name: (1, 2) if name in _SECOND else (0, 1) for name in PRODUCTS | {"mul"}}


class Product:
    """A product as it is written.

    Args:
        source: Its file.
        node: The expression.
    """

    def __init__(self, source: SourceFile, node: ast.AST) -> None:
        self._written = Written(source, node)
        operands = self._written.operands
        places: tuple[int, ...] = _FACTORS.get(self._written.name, ())
        has_bias = self._written.name == "linear" and (
            len(operands) > 2 or self._written.has_keyword("bias")
        )
        is_whole = len(operands) > max(places, default=0)
        is_whole = is_whole and not self._written.is_in_place
        self.places: tuple[int, ...] = places if is_whole and not has_bias else ()

    def scaled(self, by: str) -> str:
        """The product with its first factor, and a term, scaled."""
        places = [*self._terms, self.places[0]]
        operands = enumerate(self._written.operands)
        scaled = [f"({text} {by})" if i in places else None for i, text in operands]
        return self._written.with_operands(*scaled)

    def in_float32(self, op: Op) -> Iterator[str]:
        """Yields the product of its factors in float32."""
        return _in_float32_of(self._written, self.places, op, self._terms)

    @property
    def _terms(self) -> list[int]:
        return [0] if self._written.name in _TERMS else []

    @property
    def back(self) -> str:
        """The code that casts a result to the dtype of the first factor."""
        named = (i for i in self.places if not self._written.is_constant(i))
        factor = self._written.operands[next(named, self.places[0])]
        is_name = all(part.isidentifier() for part in factor.split("."))
        return f".to({factor}.dtype)" if is_name else ".half()"


def product_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """Forms of a product in the forward in which it stays in range."""
    row = failure.row
    if row is None or failure.found.phase != "forward":
        return
    source, node = expression_of(row, trials.applied)
    if source is None or node is None:
        return
    product = Product(source, node)
    if not product.places:
        return
    for scaling in scalings_of(source, node):
        text = f"move `{scaling.by}` before the product"
        edits = _scaled(source, node, product, scaling)
        yield _trial_of_edits(text, edits, source, row, trials)
    if failure.is_half and failure.found.op is not None:
        for wide in product.in_float32(failure.found.op):
            for text, edits in _in_float32(source, node, product, wide):
                yield _trial_of_edits(text, edits, source, row, trials)


# What names float16 in a cast.
_HALVES = {"torch.float16", "torch.half"}


def written_cast(
    failure: Failure, trials: Trials
) -> tuple[SourceFile, dict[str, Edit]] | None:
    """The cast to float16 that the program writes and that overflowed, or None.

    Returns:
        The file, and the edits that cast to a wider dtype instead, by its name.
    """
    row, op = failure.row, failure.found.op
    if row is None or op is None or op.name != "aten._to_copy" or not failure.is_half:
        return None
    source, node = expression_of(row, trials.applied)
    if source is None or not isinstance(node, ast.Call):
        return None
    written = Written(source, node)
    if written.name == "half" and written.operands:
        text = written.operands[0]
        methods = {"float32": "float", "bfloat16": "bfloat16"}
        return source, {d: Edit(node, f"{text}.{to}()") for d, to in methods.items()}
    named = [
        each
        for each in ast.walk(node)
        if isinstance(each, ast.expr) and source.text_of(each) in _HALVES
    ]
    if written.name in ("to", "type") and len(named) == 1:
        wider = ("float32", "bfloat16")
        return source, {dtype: Edit(named[0], f"torch.{dtype}") for dtype in wider}
    return None


def cast_rewrites(failure: Failure, trials: Trials) -> Attempts:
    """A cast to float16 that overflows, made one to a wider dtype."""
    cast = written_cast(failure, trials)
    if cast is None or failure.row is None:
        return
    source, edits = cast
    for dtype, edit in edits.items():
        text = f"cast to {dtype} instead of float16"
        yield _trial_of_edits(text, [edit], source, failure.row, trials)


def _scaled(
    source: SourceFile, node: ast.AST, product: Product, scaling: Scaling
) -> list[Edit]:
    """The edits that scale before the product, and no more after it."""
    new, run = product.scaled(scaling.by), product.scaled(scaling.checked)
    if scaling.rest is not None:
        return [Edit(node, new, run), Edit(scaling.whole, scaling.rest)]
    inner = scaling.scaled
    return [
        Edit(
            scaling.whole,
            source.text_with(inner, node, new),
            source.text_with(inner, node, run),
        )
    ]


def _in_float32(
    source: SourceFile, node: ast.AST, product: Product, wide: str
) -> Iterator[tuple[str, list[Edit]]]:
    """As far as the softmax, or else to the end of the expression."""
    softmax = softmax_around(source, node)
    if softmax is not None:
        text = source.text_with(softmax, node, wide)
        yield "compute attention in float32", [Edit(softmax, f"{text}{product.back}")]
        return
    softmax = later_softmax(source, node)
    if softmax is not None:
        text = source.text_of(softmax)
        edits = [Edit(node, wide), Edit(softmax, f"{text}{product.back}")]
        yield "compute attention in float32", edits
        return
    whole = outermost(source, node)
    if whole is not node:
        text = source.text_with(whole, node, wide)
        yield (
            "compute the expression in float32 to its end",
            [Edit(whole, f"({text}){product.back}")],
        )
