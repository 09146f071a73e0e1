"""The advice of a precision run: how layers are judged, and how it reads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ...base.text import as_lines, bits_left, counted, either, printable, some
from .layers import DTYPES, FLOAT8, Layer, expected_error

_MOST_ROWS = 8  # of a table in a terminal; chosen
_MOST_NAMES = 4  # in a cell of it; chosen


@dataclass(frozen=True)
class LayerAdvice:
    """One layer: what the float32 run found, and which dtypes it can take.

    Shares are of the values that are not 0. A share is "lost" if float16 makes it 0.

    Attributes:
        name: The module's qualified name.
        class_name: Its class.
        calls: How often the batches called it.
        abs_max: The largest finite magnitude of "input", "output", "weight" (its own
            parameters), "grad_output" and "grad_weight"; 0.0 if there was none.
        bits: How often the largest of the first three can double, in "float16" and
            "bfloat16"; negative: it is beyond the range.
        lost: The share of its outputs that float16 makes 0.
        subnormal: The share that is subnormal in float16 or lost.
        gradient_lost: The share of gradients, of outputs or of weights, whichever is
            larger, that float16 makes 0 without a loss scale; None without gradients.
        gradient_lost_scaled: The same with the largest safe loss scale.
        gradient_subnormal_scaled: The share that is subnormal or lost with it.
        errors: The relative L2 error of the layer alone in "float16", "bfloat16" and
            "float8", against float32 with the same inputs.
        ratios: The errors in multiples of what rounding explains.
        runs_in: The dtypes that it may run in.
        reasons: Why not, by dtype, for the others.
        not_compared: Why it has no errors, or ''.
        is_product: Whether it is linear in its inputs and its matrices.
    """

    name: str
    class_name: str
    calls: int
    abs_max: dict[str, float]
    bits: dict[str, float]
    lost: float
    subnormal: float
    gradient_lost: float | None
    gradient_lost_scaled: float | None
    gradient_subnormal_scaled: float | None
    errors: dict[str, float]
    ratios: dict[str, float]
    runs_in: list[str]
    reasons: dict[str, str]
    not_compared: str
    is_product: bool


@dataclass(frozen=True)
class PrecisionCheck:
    """A run of the whole model in half precision, against the float32 run.

    Attributes:
        dtype: Autocast's dtype, or that of the weights: "float16" or "bfloat16".
        kept: The names that `keep_in_fp32` kept in float32.
        loss_scale: The loss scale of the run; 1.0 for bfloat16.
        failure: Why it did not pass, or ''.
        finite: Whether loss and gradients (outputs, without a loss) were finite.
        loss: The mean loss over the batches, or None.
        loss_difference: The relative difference of the losses to those in float32; of
            the outputs in L2, where there is no loss; None if the run raised.
        gradient_difference: The relative L2 difference of the gradients, or None.
        widened: The names that were added because a run before this one failed.
        runs: How many runs this took.
        until: Where `keep_in_fp32` returned to half precision; empty under autocast.
    """

    dtype: str
    kept: list[str]
    loss_scale: float
    failure: str = ""
    finite: bool = False
    loss: float | None = None
    loss_difference: float | None = None
    gradient_difference: float | None = None
    widened: list[str] = field(default_factory=list)
    runs: int = 1
    until: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if it was finite and within the thresholds."""
        return not self.failure


@dataclass(frozen=True)
class PrecisionAdvice:
    """Which modules can run in which dtype; printed, it is a page of text.

    Attributes:
        rows: One `LayerAdvice` for each layer, in the order in which they first
            returned.
        float32: The names of all layers that are in neither of the next two.
        bfloat16: The names that may run in bfloat16; empty if its check has not passed.
        float16: The names that may run in float16; empty if its check has not passed.
        float8: The names of products that may take float8 (e4m3) inputs and weights.
        dtype: The dtype of the passed check that keeps the fewest modules (bfloat16,
            which needs no loss scale, where both keep as many); "float32" if none has
            passed.
        code: The line that keeps modules in float32 under autocast to `dtype`; '' if
            none has to be kept, or no check has passed.
        codes: The same by dtype, for each check that has passed.
        checks: The last check with each list.
        loss: The mean loss in float32, or None.
        loss_scale: The power of two for float16's gradients that the check used, or
            the one that was derived from the gradients; None without gradients.
        not_seen: The layers that the batches did not call: nothing is known of them.
        notes: What else to know, in sentences.
        cast: "autocast" or "half"; see `advise_precision`.
        modules: By dtype, for each check that has passed: the names of the modules to
            keep in float32, with all that is in them.
        onnx: The same as the beginnings of the names of nodes in an ONNX graph that
            `torch.onnx.export` makes with `dynamo=False`: for TensorRT's and
            onnxruntime's lists of nodes.
    """

    rows: list[LayerAdvice]
    float32: list[str]
    bfloat16: list[str]
    float16: list[str]
    float8: list[str]
    dtype: str
    code: str
    codes: dict[str, str]
    checks: list[PrecisionCheck]
    loss: float | None
    loss_scale: float | None
    not_seen: list[str]
    notes: list[str]
    cast: str = "autocast"
    modules: dict[str, list[str]] = field(default_factory=dict)
    onnx: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """The verdict, the checks and the worst layers, in about 24 lines."""
        sentences = [self._verdict(), *map(self._check_text, self.checks)]
        products = sum(row.is_product for row in self.rows)
        if products:
            sentences.append(
                f"float8: {len(self.float8)} of {products} products may take e4m3 "
                "inputs and weights, by a simulation with casts; no run has checked it."
            )
        if self.not_seen:
            sentences.append(f"Not seen in these batches: {_few(self.not_seen)}.")
        lines = as_lines([*sentences, *self.notes]).splitlines()
        return "\n".join([*lines, *self._table()])

    def _verdict(self) -> str:
        count = counted(len(self.rows), "layer")
        if self.dtype == "float32":
            return f"Stay in float32: no check has passed ({count} looked at)."
        if self.cast == "half":
            return f"Use {self.dtype} for the model: `{self.code}`"
        if not self.code:
            return f"Use autocast to {self.dtype}: all {count} may run in it."
        return f"Use autocast to {self.dtype} with: `{self.code}`"

    def _check_text(self, check: PrecisionCheck) -> str:
        parts = [f"{check.dtype}: {'passed' if check.passed else 'failed'}"]
        if check.failure:
            parts.append(f" ({check.failure})")
        parts.append(f"; {len(check.kept)} of {len(self.rows)} layers in float32")
        what = "outputs differ" if check.loss is None else "loss differs"
        if check.finite and check.loss_difference is not None:
            parts.append(f"; {what} by {check.loss_difference:.2%}")
            if check.gradient_difference is not None:
                parts.append(f", gradients by {check.gradient_difference:.2%}")
        if check.loss_scale != 1.0:
            parts.append(f"; loss scale {power_text(check.loss_scale)}")
        if check.widened:
            parts.append(f"; added after a failed run: {_few(check.widened)}")
        return "".join(parts) + "."

    def _table(self) -> list[str]:
        worst = sorted(self.rows, key=_badness)[:_MOST_ROWS]
        lines = [
            "  float16  error, in multiples of rounding's",
            "bits left  float16 bfloat16   float8  layer",
        ]
        for row in worst:
            ratios = " ".join(
                f"{_ratio_text(row, name):>8}"
                for name in ("float16", "bfloat16", "float8")
            )
            lines.append(f"{row.bits['float16']:9.1f} {ratios}  {_layer_text(row)}")
        if len(self.rows) > len(worst):
            lines.append(f"... and {len(self.rows) - len(worst)} more in .rows")
        return lines


def _badness(row: LayerAdvice) -> tuple[int, float]:
    """Sorts what can run nowhere first, then by float16's error."""
    half = [name for name in row.runs_in if name != "float8"]
    return len(half), -row.ratios.get("float16", 0.0)


def _ratio_text(row: LayerAdvice, name: str) -> str:
    ratio = row.ratios.get(name)
    if ratio is None:
        return "-"
    return f"{ratio:.1f}" if ratio < 1e5 else "inf" if math.isinf(ratio) else ">1e5"


def _layer_text(row: LayerAdvice) -> str:
    name = row.name or "the model"
    reason = next((f": {why}" for n, why in row.reasons.items() if n != "float8"), "")
    half = [name for name in ("float16", "bfloat16") if name in row.reasons]
    where = f" not {either(half)}" if half else ""
    return printable(f"{name} ({row.class_name}){where}{reason}")


def _few(names: list[str]) -> str:
    return some((name or "the model" for name in names), _MOST_NAMES)


# The judgement of each layer, by thresholds.


HALF = ("float16", "bfloat16")
_OPERANDS = 2  # inputs and weights; float8 products do not return float8
_MOST_BITS = 120  # so that a scaled loss stays within float32


@dataclass(frozen=True)
class Thresholds:
    """From where on a layer cannot take a dtype; see `advise_precision`."""

    headroom_bits: float
    max_error: float
    max_float8_error: float
    max_underflow: float
    max_loss_difference: float
    max_gradient_difference: float


def loss_scale_of(layers: Iterable[Layer], bits: float) -> float | None:
    """The largest power of two whose scaled gradients keep headroom in float16.

    Args:
        layers: The layers; their gradients count.
        bits: The headroom to keep.

    Returns:
        The power of two, which may be below 1; None without gradients.
    """
    largest = max(
        (
            max(each.output_gradients.abs_max, each.weight_gradients.abs_max)
            for each in layers
        ),
        default=0.0,
    )
    if not largest:
        return None
    room = bits_left(torch.finfo(torch.float16).max, largest) - bits
    return 2.0 ** min(math.floor(room), _MOST_BITS)


class LayerJudge:
    """Judges the layers of one run.

    Args:
        layers: The layers, in the order of their first calls.
        limits: The thresholds.

    Attributes:
        loss_scale: The safe loss scale for what can run in float16 but for its
            gradients; None without gradients.
    """

    def __init__(self, layers: list[Layer], limits: Thresholds) -> None:
        self._layers = layers
        self._limits = limits
        fit = [each for each in layers if not self._why_not_forward(each, "float16")]
        self.loss_scale = loss_scale_of(fit, limits.headroom_bits)

    def rows(self) -> list[LayerAdvice]:
        """The findings of each layer, and the dtypes that it can take."""
        return [self._row(each) for each in self._layers]

    def _row(self, layer: Layer) -> LayerAdvice:
        reasons = {name: self._why_not(layer, name) for name in DTYPES}
        scale = self.loss_scale or 1.0
        gradients = (layer.output_gradients, layer.weight_gradients)
        has_gradients = any(each.numel for each in gradients)
        return LayerAdvice(
            name=layer.name,
            class_name=layer.class_name,
            calls=layer.calls,
            abs_max={
                "input": layer.inputs.abs_max,
                "output": layer.outputs.abs_max,
                "weight": layer.weights.abs_max,
                "grad_output": layer.output_gradients.abs_max,
                "grad_weight": layer.weight_gradients.abs_max,
            },
            bits={name: _bits(layer, DTYPES[name]) for name in HALF},
            lost=layer.outputs.lost(),
            subnormal=layer.outputs.subnormal(),
            gradient_lost=max(g.lost() for g in gradients) if has_gradients else None,
            gradient_lost_scaled=(
                max(g.lost(scale) for g in gradients) if has_gradients else None
            ),
            gradient_subnormal_scaled=(
                max(g.subnormal(scale) for g in gradients) if has_gradients else None
            ),
            errors={name: each.relative for name, each in layer.errors.items()},
            ratios={name: _ratio(layer, name) for name in layer.errors},
            runs_in=[name for name, why in reasons.items() if not why],
            reasons={name: why for name, why in reasons.items() if why},
            not_compared=layer.not_compared,
            is_product=bool(layer.is_product),
        )

    def _why_not(self, layer: Layer, name: str) -> str:
        if name == "float8":
            return self._why_not_float8(layer)
        why = self._why_not_forward(layer, name)
        scale = self.loss_scale
        if why or name != "float16" or scale is None:
            return why
        for kind, gradients in (
            ("the gradients of its output", layer.output_gradients),
            ("the gradients of its weights", layer.weight_gradients),
        ):
            share = gradients.lost(scale)
            if share > self._limits.max_underflow:
                return (
                    f"{share:.0%} of {kind} become 0, even with a loss scale of "
                    f"{power_text(scale)}"
                )
        return ""

    def _why_not_forward(self, layer: Layer, name: str) -> str:
        """Why a layer's forward cannot run in half precision, or ''."""
        dtype = DTYPES[name]
        given = [("output", layer.outputs), ("input", layer.inputs)]
        given = [] if layer.has_inner else given  # of the layers within it
        for kind, found in [*given, ("weight", layer.weights)]:
            if found.has_nan:
                return f"{kind} has nan in float32"
            if found.abs_max > torch.finfo(dtype).max:
                return f"{kind} reaches {found.abs_max:.3g}, beyond {name}'s range"
            if found.bits(dtype) < self._limits.headroom_bits:
                return (
                    f"{kind} reaches {found.abs_max:.3g}, {found.bits(dtype):.1f} bits "
                    f"below the end of {name}"
                )
        if layer.is_random or layer.has_inner:
            return ""
        if layer.not_compared:
            return f"not compared: {layer.not_compared}"
        if name in layer.failures:
            return f"it raised {layer.failures[name]}"
        return self._why_error(layer, name, self._limits.max_error)

    def _why_not_float8(self, layer: Layer) -> str:
        if layer.not_compared or not layer.is_product:
            return "no product of inputs and a matrix"
        if "float8" in layer.failures:
            return f"it raised {layer.failures['float8']}"
        return self._why_error(layer, "float8", self._limits.max_float8_error)

    def _why_error(self, layer: Layer, name: str, most: float) -> str:
        if name not in layer.errors or _ratio(layer, name) <= most:
            return ""
        error = layer.errors[name].relative
        if math.isinf(error):
            return "inf or nan inside, though inputs and output fit"
        return f"error {error:.2g}, {_ratio(layer, name):.0f} x what rounding explains"


def _ratio(layer: Layer, name: str) -> float:
    """The error of a layer, in multiples of what rounding explains."""
    dtype = DTYPES[name]
    count = _OPERANDS if dtype is FLOAT8 else layer.num_roundings
    return layer.errors[name].relative / expected_error(dtype, count)


def _bits(layer: Layer, dtype: torch.dtype) -> float:
    found = (layer.inputs, layer.outputs, layer.weights)
    return min(each.bits(dtype) for each in found)


def power_text(scale: float) -> str:
    """A power of two as text."""
    return f"2^{round(math.log2(scale))}"
