"""Why an operation made a non-finite value: it is computed again in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _C
from ..torch_internals.running import attention_by_definition, schema_names, schema_of
from ..torch_internals.tensor_internals import storages
from ..tree import find, mapped, tensors_in
from .explanation import TensorSummary
from .tensor_kinds import (
    NAN,
    Kinds,
    StorageMap,
    first_bad,
    is_float,
    kinds_of,
    summary_of,
)

# Computes an operation again in float64.


_MAX_NUMEL = 2**27  # of all arguments together, which are copied
_HALF_TO_FLOAT = {"_softmax", "_log_softmax"}


def in_float64(op: OpCall) -> tuple[Any, dict[int, torch.Tensor]]:
    """Runs it in float64: its output, and what it writes to, by what it wrote to."""
    arguments = tensors_in((op.args, op.kwargs))
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in arguments):
        raise NotImplementedError("a tensor subclass")
    if sum(tensor.numel() for tensor in arguments) > _MAX_NUMEL:
        raise NotImplementedError("too large")
    written: dict[int, torch.Tensor] = {}

    def widened(value: Any) -> Any:
        wide = _widened(op, value)
        if id(value) in op.kept:
            wide = written.setdefault(id(value), wide)
        return wide

    kinds = torch.Tensor, torch.dtype
    args, kwargs = mapped((op.args, op.kwargs), widened, kinds=kinds)
    return run_in_float64(op.func, op.base, args, kwargs), written


def run_in_float64(func: Any, base: str, args: Any, kwargs: Any) -> Any:
    """Runs an operation whose arguments were widened, and returns its results.

    Raises:
        NotImplementedError: If that is not the same operation.
    """
    if not str(func).startswith(("aten.", "prims.")):
        raise NotImplementedError("an operation of an extension")
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise NotImplementedError("it draws random numbers")
    if base in _HALF_TO_FLOAT:
        args = (*args[:2], False)
    if base.startswith("_scaled_dot_product") and "backward" not in base:
        return _attention(func, args, kwargs)
    return func(*args, **kwargs)


def _widened(op: OpCall, value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    value = op.kept.get(id(value), value).detach()
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value.clone()


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Fused attention by its definition."""
    names = schema_names(func)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask", given.get("attn_bias"))
    return attention_by_definition(
        *(given["query"], given["key"], given["value"]),
        attn_mask=mask,
        is_causal=given.get("is_causal", False),
        scale=given.get("scale"),
    )


_DEGREES = {"std", "var", "std_mean", "var_mean", "std_correction", "var_correction"}
# Their results are large only because they grow; other operations have poles.
_GROW = {
    *("exp", "exp2", "expm1", "sinh", "cosh", "mul", "add", "sub", "rsub", "mm", "bmm"),
    *("addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "linear", "addr"),
    *("convolution", "sum", "prod", "cumsum", "cumprod", "square", "norm", "mean"),
    *("linalg_vector_norm", "mse_loss", "softplus", "addcmul", "lerp", "ldexp"),
    *("nansum", "logaddexp", "smooth_l1_loss", "huber_loss", "index_add", "cdist"),
    *("_cdist_forward", "scatter_add", "index_put", "trace", "kron", "celu", "elu"),
    *("gelu", "silu", "hypot", "dist", "poisson_nll_loss", "mkldnn_convolution"),
    *("_foreach_mul", "_foreach_add", "_foreach_exp", "_to_copy", "copy", *_DEGREES),
}
_OVERFLOWS_TO_NAN = {"linalg_matrix_exp"}  # in float64, too
_DIVIDES = {"div", "true_divide", "floor_divide", "remainder", "fmod", "addcdiv"}
_MADE_OF_NUMBERS = (
    "the code makes this tensor of values that torch has not computed, such as NumPy's"
)
_GIVEN = "it is given the number {}, by the code of this line or by torch within it"
_BY_NOTHING = "it divides by a sum that is 0, such as how many elements a mask selects"
_NO_LABEL_COUNTS = (
    "no label of the batch counts: all are ignored, those of every sample; labels come "
    "from the dataset and the collator: mend them there"
)
_COUNTING = {"nll_loss_forward", "nll_loss2d_forward"}

RANGE, INTERMEDIATE, UNDEFINED = "range", "intermediate", "undefined"
EMPTY, NOT_TRIED = "empty", ""


@dataclass
class Details:
    """Facts about an operation that made a non-finite value.

    Attributes:
        why: RANGE, INTERMEDIATE, UNDEFINED, EMPTY or NOT_TRIED.
        reason: In a sentence.
        inputs: The float tensors that it was given.
        outputs: Those that it returned.
        first_index: Where the first non-finite value is in the first bad one.
        outside: Which input is outside of the operation's domain, and where, or "".
        true_value: The result in float64 at the worst place, or None.
        limit: The largest number of the output's dtype.
        divides_by_number: Whether it divides by a number of Python, and no tensor.
    """

    why: str = NOT_TRIED
    reason: str = ""
    inputs: list[TensorSummary] = field(default_factory=list)
    outputs: list[TensorSummary] = field(default_factory=list)
    first_index: tuple[int, ...] | None = None
    outside: str = ""
    true_value: float | None = None
    limit: float | None = None
    divides_by_number: bool = False

    @property
    def has_bad_inputs(self) -> bool:
        """True if it was given non-finite values, which were meant."""
        return any(each.num_nan or each.num_inf for each in self.inputs)

    @property
    def is_overflow(self) -> bool:
        """True if its true result is a finite number."""
        return self.why in (RANGE, INTERMEDIATE) and self.true_value is not None


def details_of(
    op: OpCall,
    bad: Sequence[torch.Tensor],
    output: Any,
    sums: Sums,
) -> Details:
    """Looks at an operation that has just run.

    Args:
        op: The operation.
        bad: What it wrote that is non-finite.
        output: What it returned.
        sums: Knows which of its inputs count the elements of a mask.
    """
    found = Details()
    before = [op.kept.get(id(tensor), tensor) for tensor in op.read()]
    found.inputs = [summary_of(tensor) for tensor in before]
    found.outputs = [summary_of(tensor) for tensor in bad]
    found.first_index = first_new(bad[0], before)
    found.limit = torch.finfo(bad[0].dtype).max
    is_quotient = op.base.removesuffix("_") in _DIVIDES and bool(op.args)
    found.divides_by_number = is_quotient and isinstance(op.args[-1], (int, float))
    try:
        found.outside = _outside_of_domain(op, found.first_index)
        _classify(op, found, bad, output, sums)
    except Exception as error:
        text = str(error).splitlines()[:1]
        found.reason = (
            f"it could not be computed again in float64 ({type(error).__name__}: "
            f"{text[0][:80] if text else ''})"
        )
    return found


def first_new(
    bad: torch.Tensor, read: Sequence[torch.Tensor]
) -> tuple[int, ...] | None:
    """The index of the first non-finite value of a kind that was not read, or None.

    A nan is new where only infs were read, as those of a mask.
    """
    kinds = [kinds_of(tensor) for tensor in read if is_float(tensor)]
    is_nan_new = any(kinds) and not any(each & NAN for each in kinds)
    index = first_bad(bad, nan_alone=True) if is_nan_new else None
    return first_bad(bad) if index is None else index


def _classify(
    op: OpCall,
    found: Details,
    bad: Sequence[torch.Tensor],
    output: Any,
    sums: Sums,
) -> None:
    why = _reduces_nothing(op, bad[0], output, sums)
    if why:
        found.why, found.reason = EMPTY, why
        return
    why = _weighs_nothing(op, output)
    if why:
        found.why, found.reason = UNDEFINED, why
        return
    if op.is_constant or (op.numbers and not found.has_bad_inputs):
        found.why, found.reason = UNDEFINED, _MADE_OF_NUMBERS
        if not op.is_constant:
            found.reason = _GIVEN.format(op.numbers[0])
        return
    reference, written = in_float64(op)
    results = [t for t in tensors_in(output) if is_float(t)]
    references = [t for t in tensors_in(reference) if is_float(t)]
    pairs = list(zip(results, references, strict=False))
    true = [wide for own, wide in pairs if own is bad[0]]
    true = [written[id(bad[0])]] if id(bad[0]) in written else true
    if not true or true[0].shape != bad[0].shape:
        found.reason = "its float64 result has another shape"
        return
    _compare(op, found, bad[0], true[0])


def _compare(
    op: OpCall, found: Details, bad: torch.Tensor, reference: torch.Tensor
) -> None:
    """Adds the result in float64 where the operation's own is not finite."""
    values = reference.detach()[~_wide(bad).isfinite()]
    values = torch.view_as_real(values) if values.is_complex() else values
    assert found.first_index is not None and found.limit is not None
    first = float(reference[found.first_index].real)
    finite = values[values.isfinite()]
    if math.isfinite(first) or (found.has_bad_inputs and finite.numel()):
        found.true_value = float(finite[finite.abs().argmax()])
        is_beyond = abs(found.true_value) > found.limit
        found.why = RANGE if is_beyond else INTERMEDIATE
    elif op.base in _OVERFLOWS_TO_NAN and not found.has_bad_inputs:
        found.why, found.true_value = RANGE, math.inf
    elif (
        math.isinf(first)
        and not found.has_bad_inputs
        and not _is_at_pole(op, found.first_index)
    ):
        found.why = RANGE
        found.true_value = first
    else:
        found.why = UNDEFINED
        found.true_value = first


def _is_at_pole(op: OpCall, index: tuple[int, ...]) -> bool:
    """True if an infinite result in float64 is that of a pole, such as 1 / 0."""
    base = op.base.removesuffix("_")
    if base in _DIVIDES:
        divisor = op.args[-1]
        return _value_at(divisor, index) in (0.0, None)
    if base == "pow":
        return _value_at(op.args[0], index) in (0.0, None)
    return base not in _GROW


def _value_at(value: Any, index: tuple[int, ...]) -> float | None:
    """The number that an elementwise operation takes from an argument at an index."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() > len(index):
        return None
    own = index[len(index) - value.dim() :]
    own = tuple(0 if n == 1 else i for i, n in zip(own, value.shape, strict=True))
    return float(value[own]) if not value.is_complex() else None


_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"}
# Of elementwise operations, what their first argument must be.
_DOMAINS: dict[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(("log", "log2", "log10", "rsqrt"), ("above 0", lambda x: x > 0)),
    "sqrt": ("at least 0", lambda x: x >= 0),
    **dict.fromkeys(("acos", "asin"), ("from -1 to 1", lambda x: -1 <= x <= 1)),
    **dict.fromkeys(("atanh", "erfinv"), ("between -1 and 1", lambda x: -1 < x < 1)),
    "logit": ("between 0 and 1", lambda x: 0 < x < 1),
    "log1p": ("above -1", lambda x: x > -1),
    "acosh": ("at least 1", lambda x: x >= 1),
    "reciprocal": ("other than 0", lambda x: x != 0),
}


def _outside_of_domain(op: OpCall, index: tuple[int, ...] | None) -> str:
    """Names an argument that is outside of the operation's domain, and where."""
    base = op.base.removesuffix("_")
    if "batch_norm" in base and "backward" not in base:
        return _negative_variance(op)
    if index is None or not op.args:
        return ""
    if base == "_ctc_loss" and len(index) == 1:
        return _too_few_frames(op, index[0])
    first = op.kept.get(id(op.args[0]), op.args[0])
    value = _value_at(first, index)
    if base in _DOMAINS and value is not None and math.isfinite(value):
        text, is_inside = _DOMAINS[base]
        if not is_inside(value):
            return f"its input is {_at(first, value, index)}; {base} needs one {text}"
    if base == "pow" and len(op.args) > 1 and value is not None:
        power = _value_at(op.args[1], index)
        if power is None or not math.isfinite(power):
            return ""
        if (value < 0 and power != int(power)) or (value == 0 and power < 0):
            return f"its input is {_at(first, value, index)}, the exponent {power:g}"
    if base in _SOFTMAXES and isinstance(first, torch.Tensor) and first.dim():
        return _masked_row(first, op.args[1], index)
    if base == "logsumexp" and isinstance(first, torch.Tensor) and first.dim():
        (dim, *others), place = op.args[1], list(index)
        if len(place) < first.dim():  # that dimension is gone from the result
            place.insert(dim % first.dim(), 0)
        return "" if others else _masked_row(first, dim, tuple(place))
    if base == "_weight_norm_interface" and isinstance(first, torch.Tensor):
        return _row_of_zeros(first, op.args[2] if len(op.args) > 2 else 0, index)
    if base in _DIVIDES and len(op.args) > 1 and _value_at(op.args[1], index) == 0:
        if isinstance(op.args[1], torch.Tensor):
            return f"the divisor is {_at(op.args[1], 0.0, index)}"
        return f"the divisor is the number {op.args[1]:g}"
    return ""


def _masked_row(scores: torch.Tensor, dim: Any, index: tuple[int, ...]) -> str:
    """Names a row of a softmax that is -inf throughout: nothing is left to weigh."""
    if not isinstance(dim, int) or len(index) != scores.dim():
        return ""
    dim %= scores.dim()
    place: list[Any] = list(index)
    place[dim] = slice(None)
    row = scores[tuple(place)]
    if not bool((row == -math.inf).all()):
        return ""
    at = ", ".join(":" if i == dim else str(n) for i, n in enumerate(index))
    return f"all {row.numel()} scores at [{at}] are -inf"


def _row_of_zeros(tensor: torch.Tensor, dim: int, index: tuple[int, ...]) -> str:
    """Names a row of a weight that has no direction: it is 0 throughout."""
    if bool(tensor.select(dim, index[dim]).any()):
        return ""
    at = ", ".join(str(n) if i == dim else ":" for i, n in enumerate(index))
    return f"all of its input at [{at}] is 0, whose norm it divides by"


def _too_few_frames(op: OpCall, sample: int) -> str:
    """Names a sample whose labels no alignment has: there are too few frames."""
    targets, frames, lengths = op.args[1], list(op.args[2]), list(op.args[3])
    num, before = int(lengths[sample]), sum(map(int, lengths[:sample]))
    own = targets[sample] if targets.dim() == 2 else targets[before:]
    num_repeated = int((own[1:num] == own[: num - 1]).sum()) if num > 1 else 0
    if int(frames[sample]) >= num + num_repeated:
        return ""
    more = f", {num_repeated} of them the same as the one before" * (num_repeated > 0)
    return f"sample {sample} has {int(frames[sample])} frames for {num} labels{more}"


def _at(value: Any, number: float, index: tuple[int, ...]) -> str:
    """A number with its place in a tensor, where that has several."""
    if not isinstance(value, torch.Tensor) or value.numel() == 1:
        return f"{number:.3g}"
    own = index[len(index) - value.dim() :]
    own = tuple(0 if n == 1 else i for i, n in zip(own, value.shape, strict=True))
    return f"{number:.3g} at {list(own)}"


def _negative_variance(op: OpCall) -> str:
    """Names a running variance that a batch norm takes the root of below 0."""
    names = schema_names(op.func)
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    variance, eps = given.get("running_var"), given.get("eps", given.get("epsilon", 0))
    if variance is None or given.get("training"):
        return ""
    places = (variance + eps <= 0).nonzero().flatten().tolist()
    if not places:
        return ""
    return f"running_var is {float(variance[places[0]]):.3g} at {places[:1]}"


def _reduces_nothing(op: OpCall, bad: torch.Tensor, output: Any, sums: Sums) -> str:
    """Describes what it reduces, if that is nothing; else ""."""
    base = op.base.rstrip("_")
    read = [t for t in tensors_in(op.args) if t.is_floating_point() or t.is_complex()]
    if base in _COUNTING:
        return _NO_LABEL_COUNTS * _has_no_label(op)
    if any(tensor.numel() == 0 for tensor in read):
        return f"{base} of a tensor without elements"
    if base in _DEGREES and read and read[0].isfinite().all():
        why = f"{base} of one element: its divisor, 1 - correction, is 0"
        return why * _has_one_element(read[0], bad)
    index = first_bad(bad)
    if base in _DIVIDES and index is not None and len(op.args) > 1:
        by, of = op.args[1], op.kept.get(id(op.args[0]), op.args[0])
        if _value_at(by, index) == 0 == _value_at(of, index):
            if sums.has_no_label(op.args[0]):
                return _NO_LABEL_COUNTS
            if any(by is count for count in sums.counts_in(op)):
                return _BY_NOTHING
    return ""


def _weighs_nothing(op: OpCall, output: Any) -> str:
    """Describes the class weights whose sum a mean is divided by, if that is 0."""
    if op.base.rstrip("_") not in _COUNTING or op.args[2] is None:
        return ""
    if float(tensors_in(output)[1]) != 0:
        return ""
    labels, weight, ignored = op.args[1], op.args[2], op.args[4]
    classes = labels[labels != ignored].unique().tolist()
    weights = ", ".join(f"{float(weight[i]):g} of class {i}" for i in classes[:4])
    more = ", ..." * (len(classes) > 4)
    return (
        "the mean divides by the sum of the labels' class weights, which is 0: "
        f"{weights}{more}"
    )


def _has_no_label(op: OpCall) -> bool:
    """True if a loss adds up no label: all are ignored."""
    labels, reduction, ignored = op.args[1], op.args[3], op.args[4]
    return reduction != 0 and bool((labels == ignored).all())


def _has_one_element(tensor: torch.Tensor, result: torch.Tensor) -> bool:
    return tensor.numel() <= max(1, result.numel())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    return values.float() if values.itemsize == 1 else values


# One call of an operation: what it reads and what it writes.


# These write to all of their first argument, whatever was in it.
_OVERWRITE = {
    *("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"),
    *("exponential_", "set_", "resize_", "log_normal_", "cauchy_", "geometric_"),
}
# Whatever they return or write to comes from other ranks, and may not be there yet.
_COMMUNICATION = ("c10d.", "_c10d_functional", "c10d_functional", "_dtensor.")
_WAITS = "wait_tensor"
CONSTANT = "lift_fresh"  # what `torch.tensor(1.0)` ends with: it makes what it is given
# Batch norm's schemas do not say that it writes to these.
_STATISTICS = ("running_mean", "running_var")


class OpCall:
    """A call of an operation that is about to run.

    Args:
        func: The operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Attributes:
        name: Its name, such as "aten.div.Tensor".
        base: The same without namespace and overload, such as "div".
        written: The tensors that it writes to.
        kept: What was in those, by their `id`, where it reads it.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        name = str(func)
        self.name = name.removesuffix(".default")
        parts = name.split(".")
        self.base = parts[1] if len(parts) > 1 else name
        self.written: list[torch.Tensor] = []
        self._overwritten: list[torch.Tensor] = []
        self.kept: dict[int, torch.Tensor] = {}
        self._only_read: list[torch.Tensor] = []
        self._versions: list[int] = []
        schema = schema_of(func)
        if schema is not None and (schema.is_mutable or "batch_norm" in self.base):
            self._note_written(schema)
        if self.name.startswith("c10d.") and self._has_output_first():
            self._overwritten += tensors_in(args[0])

    @functools.cached_property
    def _arguments(self) -> list[torch.Tensor]:
        """The tensors that it is given."""
        return tensors_in((self.args, self.kwargs))

    def run(self) -> Any:
        """Runs it, and returns what it returned."""
        return self.func(*self.args, **self.kwargs)

    def _has_output_first(self) -> bool:
        """True if a collective only writes to its first argument, as most do."""
        takes_two = len(self.args) > 1 and bool(tensors_in(self.args[1]))
        return takes_two or self.base.startswith("recv")

    def _note_written(self, schema: Any) -> None:
        for i, argument in enumerate(schema.arguments):
            alias, name = argument.alias_info, argument.name
            is_written = alias is not None and alias.is_write
            if not is_written and name not in _STATISTICS:
                continue
            value = self.args[i] if i < len(self.args) else self.kwargs.get(name)
            tensors = tensors_in(value)
            self.written += tensors
            if argument.is_out or (i == 0 and self.base in _OVERWRITE):
                self._overwritten += tensors

    def read(self, floats: bool = True) -> list[torch.Tensor]:
        """The tensors whose values it reads.

        Args:
            floats: Whether to leave out those that can hold no nan, or nothing.
        """
        if self.base == CONSTANT:
            return []
        return [
            tensor
            for tensor in self._arguments
            if not any(tensor is each for each in self._overwritten)
            if not floats or (is_float(tensor) and tensor.numel())
        ]

    def keep_written(self) -> None:
        """Copies what it reads and then overwrites."""
        for tensor in self.written:
            if not any(tensor is each for each in self._overwritten):
                self.kept[id(tensor)] = tensor.detach().clone()

    def note_versions(self) -> None:
        """Notes how often what it reads alone was written to."""
        self._only_read = [
            tensor
            for tensor in self._arguments
            if not any(tensor is each for each in self.written)
        ]
        self._versions = _C.versions_of(self._only_read)

    @property
    def is_as_it_was(self) -> bool:
        """True if nobody has written to its arguments since it ran."""
        return _C.versions_of(self._only_read) == self._versions

    def fresh(self, output: Any) -> list[torch.Tensor]:
        """The results that it returns in memory of their own."""
        if self.base == CONSTANT:
            return tensors_in(output)
        given = {key for tensor in self._arguments for key in storages(tensor)}
        return [
            tensor
            for tensor in tensors_in(output)
            if not given.intersection(storages(tensor))
        ]

    @property
    def is_communication(self) -> bool:
        """True if it takes part in a collective, or waits for one."""
        return self.name.startswith(_COMMUNICATION)

    @property
    def waits(self) -> bool:
        """True if it waits for a collective, whose result it is given."""
        return self.is_communication and self.base == _WAITS

    @property
    def is_constant(self) -> bool:
        """True if it makes a tensor of a number of Python."""
        return self.base == CONSTANT

    @property
    def numbers(self) -> list[float]:
        """The numbers of Python among its arguments that are nan or inf."""
        numbers = [number for _, number in find((self.args, self.kwargs), (float,))]
        return [number for number in numbers if not math.isfinite(number)]


# Whose value became a nan that has spread since: its bits tell.
#
# A nan keeps the bits of the value that it was made of, below the exponent, and hands
# them on through additions and multiplications, as those of clipping by a norm.


# The integer type, the bits of the exponent, and the bit that marks a quiet nan.
_LAYOUTS = {
    torch.float32: (torch.int32, 0x7F800000, 0x00400000, 0x007FFFFF),
    torch.float64: (torch.int64, 0x7FF0 << 48, 0x0008 << 48, 0x000F_FFFF_FFFF_FFFF),
}


def gradient_of_payload(
    bad: Mapping[str, torch.Tensor], clean: Mapping[str, torch.Tensor]
) -> tuple[str, str]:
    """Finds the one gradient in which a bit of the exponent has flipped.

    Args:
        bad: The gradients that hold nan, by name.
        clean: Those of a replay that is finite.

    Returns:
        Its name and a sentence; two empty texts if the bits do not tell, as most often:
        exactly one value of all has to have the nan's bits.
    """
    payloads = {_payload(tensor) for tensor in bad.values()}
    if len(payloads) != 1 or None in payloads:
        return "", ""
    payload = payloads.pop()
    assert payload is not None
    places = [
        (name, int(index))
        for name, tensor in clean.items()
        for index in _places(tensor, payload)
    ]
    if len(places) != 1:
        return "", ""
    name, index = places[0]
    value = float(clean[name].flatten()[index])
    return name, (
        f"the nan in all gradients has the bits of one value alone: {value:.6g}, the "
        f"replayed gradient of {name} at {index}, with its exponent set to ones"
    )


def _payload(tensor: torch.Tensor) -> int | None:
    """The bits that all elements share, if they are one and the same nan."""
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None or tensor.layout is not torch.strided or not tensor.numel():
        return None
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer)
    first = bits.flatten()[0]
    if not bool(tensor.isnan().all()) or not bool((bits == first).all()):
        return None
    payload = int(first) & mantissa & ~quiet
    return payload or None  # a nan of no value, as of 0 / 0


def _places(tensor: torch.Tensor, payload: int) -> list[int]:
    layout = _LAYOUTS.get(tensor.dtype)
    if layout is None:
        return []
    integer, _, quiet, mantissa = layout
    bits = tensor.detach().contiguous().view(integer).flatten()
    same = (bits & (mantissa & ~quiet)) == payload
    return same.nonzero().flatten().tolist()[:2]


# Follows sums of masks: a mean of what a mask selects divides by one.


_SUMS = {"sum", "count_nonzero", "cumsum", "nansum", "bincount"}
_MASK, _SUM, _ZERO, _COUNT = "mask", "sum", "sum of zeros", "sum of mask"
_UNLABELED = "loss of no label"
_ORDER = ("", _MASK, _SUM, _ZERO, _COUNT, _UNLABELED)


class Sums:
    """Knows which tensors are masks, or sums, or computed of one of them alone.

    Args:
        kinds: Knows the magnitudes of tensors.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._known: StorageMap[str] = StorageMap()

    def note(self, op: OpCall, fresh: Sequence[torch.Tensor]) -> None:
        """Takes in what an operation returned in memory of its own."""
        read, kind = op.read(floats=False), ""
        if op.base in _COUNTING and len(fresh) > 1 and _has_no_label(op):
            fresh, kind = fresh[:1], _UNLABELED
        elif op.base in _SUMS:
            kind = max(map(self._sum_of, read), key=_ORDER.index, default="")
        elif len(read) == 1:
            is_cast = op.base == "_to_copy" and not is_float(read[0])
            kind = _MASK if is_cast else self._known.get(read[0]) or ""
        if kind:
            for tensor in fresh:
                self._known.put(tensor, kind)

    def has_no_label(self, value: Any) -> bool:
        """True for a sum of losses to which no label has added one."""
        is_tensor = isinstance(value, torch.Tensor)
        return is_tensor and self._known.get(value) == _UNLABELED

    def counts_in(self, op: OpCall) -> list[torch.Tensor]:
        """Finds inputs of an operation that count the elements which a mask selects."""
        read = op.read(floats=False)
        kinds = [self._known.get(tensor) for tensor in read]
        is_mean = len(read) == 2 and all(kinds)  # of what may be nothing but zeros
        return [
            tensor
            for tensor, kind in zip(read, kinds, strict=True)
            if kind == _COUNT or (kind == _ZERO and is_mean)
        ]

    def _sum_of(self, tensor: torch.Tensor) -> str:
        """Classifies the sum of a tensor."""
        if self._known.get(tensor) == _UNLABELED:
            return _UNLABELED
        if not is_float(tensor) or self._known.get(tensor) == _MASK:
            return _COUNT
        if tensor.numel() == 0:
            return _ZERO
        stat = self._kinds.stat(tensor)
        if stat.abs_max == 1 and stat.abs_min in (0, 1):
            return _COUNT
        return _ZERO if stat.abs_max == 0 else _SUM
