"""torch's operations as one table: all that this package knows of them by name.

A name is that of an operator of aten, without namespace and overload, or of a function
of torch's; an operation in place has the row of the plain one. A function has the row
of the operator that it becomes, `layer_norm` that of `native_layer_norm`: who asks may
have either name. What torch itself knows of its operators is asked of torch: which are
random, and which are views. Tests compare the table with torch's registry, and with the
operators that functions become.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from ..torch_internals.replaying import schema_defaults, schema_names, schema_of

# What a row may say of an operation:
#
# adds             sums elements: those of a mask are how many it selects
# at_least_0       returns no number below 0
# bilinear         is linear in each of two factors
# casts            changes the dtype
# commutes         takes its two operands in any order
# constant         makes a tensor of a number of Python
# cuts             puts a bound in place of numbers beyond it
# deviation        divides by the number of elements less a correction
# difference       subtracts
# divides          by its last argument
# draws            draws numbers from a distribution, and no mask
# each             computes each element by itself: `f` in the pattern of a remedy
# empty            returns memory that nobody has written to
# grows            is infinite only where it is large: it has no pole
# kink             has no one slope where its two operands are equal
# leaves_out_nan   is of what is not nan among its inputs
# linear           is linear in its inputs together; clamp where it changes nothing
# measure          measures a tensor, as a normalization does before it takes a root
# moves            returns values that it was given, and computes none
# nan_of_overflow  returns nan where its result is too large, in float64, too
# normalizes       is a fused normalization
# of_labels        is a loss that counts no label which is to be ignored
# overwrites       writes to all of its first argument, whatever was in it
# pivots           divides by what is left of a matrix's diagonal, or takes its log
# product          multiplies the last two of its tensors as matrices
# promotes         returns float32 where one of its tensors has it
# random           returns something else each time
# reinterprets     returns a view whose elements are other numbers
# root             measures a tensor, and takes a root
# same             returns the values that it was given, each where it was
# softmax          weighs scores, all of which may be masked
# tells            tells of a tensor, and makes none: most of all calls
# whole            makes whole numbers of whole numbers
Trait = Literal[
    "adds", "at_least_0", "bilinear", "casts", "commutes", "constant", "cuts",
    "deviation", "difference", "divides", "draws", "each", "empty", "grows",
    "kink", "leaves_out_nan", "linear", "measure", "moves", "nan_of_overflow",
    "normalizes", "of_labels", "overwrites", "pivots", "product", "promotes", "random",
    "reinterprets", "root", "same", "softmax", "tells", "whole",
]  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """A row of the table.

    Attributes:
        traits: What is said of the operation.
        needs: What its first argument must be, where no number tells; or "".
        is_inside: Whether a finite number is that.
        above: The number that its second argument must be above, or None.
        never: Magnitudes that its results of finite numbers never are.
        safe: An argument at which it and its derivative are finite.
        sign: How it is written between two numbers, or "".
        parameters: Those that patterns of remedies read, in order.
    """

    traits: frozenset[str] = frozenset()
    needs: str = ""
    is_inside: Callable[[float], bool] = math.isfinite
    above: float | None = None
    never: tuple[float, ...] = ()
    safe: float = 1.0
    sign: str = ""
    parameters: tuple[str, ...] = ()


# One name for what is one operation; "r" marks operands that stand the other way round.
# `special_exp2` is `exp2` without a row here.
ALIASES = {
    **dict.fromkeys(("true_divide", "divide"), "div"),
    **dict.fromkeys(("__rdiv__", "__rtruediv__"), "rdiv"),
    **dict.fromkeys(("mm", "bmm", "__matmul__", "linalg_matmul"), "matmul"),
    **dict.fromkeys(("vector_norm", "linalg_vector_norm", "linalg_norm"), "norm"),
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type"), "to"),
    **{"__rsub__": "rsub", "__rpow__": "rpow", "__pow__": "pow"},
    **{"multiply": "mul", "subtract": "sub", "negative": "neg", "absolute": "abs"},
    **{"arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "arccosh": "acosh"},
    **{"arctan2": "atan2", "clip": "clamp", "matrix_exp": "linalg_matrix_exp"},
    **{"special_expit": "sigmoid", "special_psi": "digamma"},
    **{"special_gammainc": "igamma", "special_gammaincc": "igammac"},
    **{"special_gammaln": "lgamma", "linalg_svd": "svd", "linalg_eigh": "eigh"},
    **{"linalg_inv": "inverse", "linalg_cholesky": "cholesky", "linalg_det": "det"},
    **{"linalg_slogdet": "slogdet", "linalg_eig": "eig"},
}
SWAPPED = ("rdiv", "rsub", "rpow")


def _op(traits: str = "", parameters: str = "", **columns: Any) -> Operation:
    return Operation(
        frozenset(traits.split()), parameters=(*parameters.split(),), **columns
    )


_ABOVE_0: dict[str, Any] = {"is_inside": lambda x: x > 0}
_AT_LEAST_0: dict[str, Any] = {"is_inside": lambda x: x >= 0}
_TWO = "input other"

# A name with a star is that of each operation without a row of its own that it matches.
# fmt: off
_TABLE = (
    # Sums, products and quotients of numbers.
    ("add", _op("commutes grows linear promotes", _TWO, sign="+")),
    ("sub", _op("grows difference promotes", _TWO, sign="-")),
    ("rsub", _op("grows difference promotes")),
    ("mul", _op("bilinear commutes grows promotes whole", _TWO, sign="*")),
    ("div", _op("divides each promotes", _TWO, sign="/")),
    ("rdiv", _op("each promotes")),
    ("floor_divide remainder fmod addcdiv", _op("divides promotes")),
    ("addcmul hypot ldexp", _op("grows promotes")),
    ("lerp", _op("grows")),
    ("pow", _op("each promotes", "input exponent", sign="**")),
    ("rpow", _op("promotes")),
    ("reciprocal", _op("each", is_inside=lambda x: x != 0, sign="/")),
    # Of matrices.
    ("mm bmm", _op("bilinear product grows")),
    ("matmul", _op("bilinear product grows", _TWO)),
    ("addmm baddbmm", _op("product grows")),
    ("linear", _op("grows", "input weight bias")),  # its weight is transposed
    ("addbmm addmv mv dot vdot addr inner outer einsum trace", _op("grows")),
    ("kron", _op("grows promotes")),
    ("*convolution* conv1d conv2d conv3d", _op("grows")),
    ("*slogdet* *linalg_inv* *linalg_solve* *linalg_lu* inverse *cholesky*",
     _op("pivots")),
    ("logdet", _op("pivots", needs="matrix whose determinant is not negative")),
    ("linalg_matrix_exp", _op("nan_of_overflow")),
    # Powers and logarithms.
    ("exp", _op("at_least_0 each grows", never=(0.0,), safe=0.0)),
    ("exp2", _op("at_least_0 each grows", never=(0.0,))),
    ("expm1 sinh cosh", _op("each grows", safe=0.0)),
    ("square", _op("at_least_0 each grows")),
    ("log log2 log10", _op("each", **_ABOVE_0)),
    ("log1p", _op("each", is_inside=lambda x: x > -1)),
    ("sqrt", _op("at_least_0 each root", **_AT_LEAST_0)),
    ("rsqrt", _op("at_least_0 each root", **_ABOVE_0)),
    ("xlogy", _op("promotes", above=0.0)),
    ("special_xlog1py", _op("promotes", above=-1.0)),
    ("logaddexp logaddexp2", _op("grows promotes")),
    # Other functions of a number.
    ("acos asin",
     _op("each", safe=0.0, is_inside=lambda x: -1 <= x <= 1)),
    ("atanh erfinv",
     _op("each", safe=0.0, is_inside=lambda x: -1 < x < 1)),
    ("acosh", _op("each", safe=2.0, is_inside=lambda x: x >= 1)),
    ("logit special_ndtri",
     _op("each", safe=0.5, is_inside=lambda x: 0 < x < 1)),
    ("tan", _op("each")),
    ("lgamma digamma", _op("each", is_inside=lambda x: x > 0 or x != math.floor(x))),
    ("special_entr", _op("each", **_AT_LEAST_0)),
    ("special_bessel_y0 special_bessel_y1", _op("each", **_ABOVE_0)),
    ("special_*modified_bessel_k0 special_*modified_bessel_k1",
     _op("each", **_ABOVE_0)),
    ("i0 special_i1 special_modified_bessel_i0 special_modified_bessel_i1",
     _op("each grows")),
    ("special_erfcx special_log_ndtr rad2deg", _op("each grows")),
    ("sigmoid", _op("at_least_0", never=(0.0, 1.0))),
    ("tanh erf", _op(never=(1.0,))),
    ("erfc", _op(never=(0.0,))),
    ("softplus", _op("at_least_0 grows", never=(0.0,))),
    ("celu elu selu gelu silu", _op("grows")),
    ("atan2 min copysign nextafter", _op("promotes")),
    ("maximum minimum", _op("kink promotes")),
    ("relu", _op("at_least_0 cuts")),
    ("relu6 hardtanh", _op("cuts")),
    ("fmax fmin", _op("kink leaves_out_nan promotes")),
    ("cat stack", _op("promotes")),
    ("clamp_min clamp_max", _op("cuts promotes")),
    ("igamma igammac special_zeta special_*_polynomial_*", _op("promotes")),
    # Of several numbers one.
    ("sum", _op("adds grows linear measure whole", "input dim keepdim")),
    ("nansum", _op("adds grows leaves_out_nan")),
    ("nanmean nanmedian", _op("leaves_out_nan", "input dim keepdim")),
    ("cumsum", _op("adds grows linear", "input dim")),
    ("count_nonzero bincount", _op("adds")),
    ("mean", _op("grows linear measure", "input dim keepdim")),
    ("prod", _op("grows", "input dim keepdim")),
    ("cumprod", _op("grows")),
    ("norm",  # "each" of a row
     _op("at_least_0 each grows root", "input p dim keepdim")),
    ("std", _op("at_least_0 deviation grows root", "input dim")),
    ("var", _op("at_least_0 deviation grows measure")),
    ("var_mean std_mean", _op("deviation grows measure")),
    ("abs", _op("at_least_0 measure")),
    ("max", _op("measure promotes")),
    ("amax", _op("measure", "input dim keepdim")),
    ("logsumexp", _op(parameters="input dim keepdim")),
    ("dist", _op("at_least_0 grows promotes")),
    ("cdist _cdist_forward", _op("grows")),
    ("softmax _softmax _safe_softmax",
     _op("at_least_0 softmax", "input dim", never=(0.0,))),
    ("log_softmax _log_softmax", _op("softmax", "input dim")),
    ("layer_norm native_layer_norm group_norm native_group_norm", _op("normalizes")),
    ("rms_norm _fused_rms_norm instance_norm", _op("normalizes")),
    ("nll_loss nll_loss_forward nll_loss2d_forward", _op("of_labels")),
    ("mse_loss smooth_l1_loss", _op("grows promotes")),
    ("huber_loss poisson_nll_loss", _op("grows")),
    # What moves numbers, besides views, or keeps some.
    ("to", _op("casts moves same")),
    ("_to_copy", _op("casts grows same")),
    ("contiguous clone", _op("moves same")),
    ("detach", _op("same")),
    ("__getitem__ T mT masked_select", _op("moves")),
    ("broadcast_tensors flip fliplr flipud rot90 roll", _op("moves")),
    ("tile repeat repeat_interleave _unsafe_view", _op("moves")),
    ("gather index_select take_along_dim", _op("moves")),
    ("index_add scatter_add", _op("grows linear")),
    ("index_put", _op("grows")),
    ("scatter", _op("linear")),
    ("where", _op("linear promotes", "condition input other")),
    ("masked_fill", _op("linear promotes", "input mask value")),
    ("clamp", _op("cuts linear promotes whole", "input min max")),
    ("real imag view_as_real view_as_complex as_strided _neg_view indices values",
     _op("reinterprets")),
    # What makes tensors, or writes to all of one.
    ("copy", _op("grows overwrites")),
    ("fill zero set", _op("overwrites")),
    ("rand rand_like", _op("at_least_0 draws")),
    ("randn randn_like poisson", _op("draws")),
    ("uniform normal exponential log_normal cauchy geometric",
     _op("draws overwrites")),
    ("_philox_normal _philox_uniform", _op("draws overwrites")),
    ("bernoulli random", _op("overwrites")),
    ("_fill_mem_eff_dropout_mask", _op("overwrites")),
    ("resize_ resize_as_ _resize_output_", _op("empty overwrites")),
    ("empty empty_* new_empty* _empty_*", _op("empty")),
    ("lift_fresh", _op("constant")),  # what `torch.tensor(1.0)` ends with
    ("dropout1d dropout2d dropout3d gumbel_softmax fractional_max_pool*",
     _op("random")),
    # What tells of tensors.
    ("size dim stride numel is_contiguous is_floating_point is_complex", _op("tells")),
    ("__len__ __format__ __repr__ __hash__ __set__ _set_grad_enabled", _op("tells")),
    ("shape dtype device requires_grad grad is_cuda is_cpu ndim layout", _op("tells")),
    ("is_leaf grad_fn _version is_sparse is_nested itemsize", _op("tells")),
    ("requires_grad_ register_hook is_inference element_size", _op("tells")),
    ("storage_offset data_ptr untyped_storage item", _op("tells")),
)
# fmt: on
ROWS = {name: op for names, op in _TABLE for name in names.split()}
_PATTERNS = {name: op for name, op in ROWS.items() if "*" in name}
_OF_LISTS = {"grows", "overwrites"}  # of `_foreach_exp` what is said of `exp`


def base_of(name: str) -> str:
    """An operator's name without namespace and overload: "div" of "aten.div.Tensor"."""
    return name.split(".")[1] if "." in name else name


@functools.cache
def plain_name(name: str) -> str:
    """The one name of an operation that has several."""
    plain = ALIASES.get(name, name)
    short = plain.removeprefix("special_")
    return short if plain not in ROWS and short in ROWS else plain


@functools.cache
def op_of(name: str) -> Operation:
    """The row of an operation; an empty one where nothing is known.

    Args:
        name: Its name, without namespace and overload.
    """
    short = name.removesuffix("_")
    for each in (name, short, plain_name(name), plain_name(short)):
        if each in ROWS:
            return ROWS[each]
    if short.startswith("_foreach_"):
        return Operation(op_of(short.removeprefix("_foreach_")).traits & _OF_LISTS)
    fitting = (op for each, op in _PATTERNS.items() if fnmatchcase(name, each))
    return next(fitting, Operation())


@functools.cache
def has(name: str, trait: Trait) -> bool:
    """True if an operation has a trait.

    Args:
        name: Its name, without namespace and overload.
        trait: One of those that the table explains.
    """
    if trait in op_of(name).traits:
        return True
    asked = _ASKED.get(trait)
    return asked is not None and any(map(asked, _overloads(name)))


# What torch tells of its operators.


def is_sum(name: str) -> bool:
    """True for a sum or a mean."""
    return has(name, "linear") and has(name, "measure")


def _overloads(name: str) -> Iterator[Any]:
    packet: Any = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if hasattr(packet, "overloads") else ():
        yield getattr(packet, overload)


def draws(operator: Any, args: Any, kwargs: Any) -> bool:
    """True if a call of an operator draws numbers: dropout that is off does not."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    by_place = dict(zip(schema_names(operator), args, strict=False))
    given = {**schema_defaults(operator), **by_place, **kwargs}
    rates = (given.get(name) for name in ("dropout_p", "dropout"))
    is_off = any(rate == 0 for rate in rates if isinstance(rate, (int, float)))
    return not (is_off or given.get("train", given.get("training")) is False)


def _is_random(operator: Any) -> bool:
    """True for one that draws numbers unless it is told not to."""
    return draws(operator, (), {"train": True, "training": True})


def _is_move(operator: Any) -> bool:
    name = base_of(str(operator))
    return is_view(operator) and not has(name, "reinterprets")


_ASKED: dict[Trait, Callable[[Any], bool]] = {"random": _is_random, "moves": _is_move}


def is_view(operator: Any) -> bool:
    """True if an operator writes to nothing, and returns views alone."""
    schema = schema_of(operator)
    returns = [] if schema is None or schema.is_mutable else schema.returns
    return bool(returns) and all(each.alias_info is not None for each in returns)
