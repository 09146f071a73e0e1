"""The failure that remedies are tried for: its explanation, and what was measured.

A `Search` makes one of the origin that it has explained (`Failure.of`) and fills in
what it knows of the step. Where a remedy uncovers another failure in the same step,
`attempts.py` makes one of that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.tensors import HALF
from ...base.text import dtype_name
from ...base.torch_ops import base_of, has
from ...guard.report.causes import UNDEFINED
from ...guard.report.explanation import Explanation
from ..bounds import tolerance
from ..call_growth import CallGrowth, growth_of, leap_before
from ..calls import Call
from ..domain import beyond_pole
from ..explain_origin import mask_of
from ..op_call import OpCall
from ..op_table import OpTable
from ..replayer import ReplayResult
from ..torch_calls import Key, TorchCall, calls_before
from ..trace_back import RootOp
from .true_step import InFloat64, in_float64


def _largest_in(ops: Iterable[OpCall]) -> float:
    """The largest finite magnitude in the results of operations; 0 for none."""
    sizes = (op.abs_max or 0.0 for op in ops)
    return max(filter(math.isfinite, sizes), default=0.0)


@dataclass
class Failure:
    """A failure that is explained.

    Attributes:
        found: Its explanation.
        op: The operation that is named, or None.
        place: The place of the call in which it failed.
        bad: The tensor of the batch that is non-finite, or None.
        modules: The names of the modules that ran from the operation on, in order.
        mask: The operation that made the infs of a mask which the operation was given.
        lost: The operation whose rounding made it undefined, or None.
        has_tie: It has met equal numbers, one of them given; see `rounding.py`.
        growth: How results grew up to it, where it is an overflow, or None.
        leap: The operation that made large numbers before an overflow, or None.
        has_drifted: A small weight is another one since the guard began.
        num_near: How many rows of a divisor are near 0, where it has a row of each
            sample and the quotient overflowed by it; else 0.
        others: The replay of the step without the sample that fails, if it was run.
        clean: The call that failed with the batch of the last clean step, or None.
        is_compiled: True if the step calls code that was compiled.
        calls: The torch calls of the replay in which it was found.
        failed: The keys of all that have made bad values of finite ones in it.
        in_float64: The step in float64; None where that is not the same step.
        nearby: The largest finite magnitude in the few operations which made its
            argument.
        losses: The losses of the step up to the call, where all are finite.
        usual_losses: The magnitudes of the losses of the last steps before.
        usual_gradient: The median of the largest magnitudes in the gradients of the
            steps before; 0 if none is known.
        stays_within: The step ends finite: what follows leaves the bad values out.
        within: The module that has them then; None if it is of none.
        is_kept: The loss is finite, and what the step leaves for later ones is not.
    """

    found: Explanation
    op: OpCall | None
    place: int
    bad: torch.Tensor | None = None
    modules: Sequence[str] = ()
    mask: OpCall | None = None
    lost: OpCall | None = None
    has_tie: bool = False
    growth: CallGrowth | None = None
    leap: OpCall | None = None
    has_drifted: bool = False
    num_near: int = 0
    others: ReplayResult | None = None
    clean: Call | None = None
    is_compiled: bool = False
    calls: Sequence[TorchCall] = ()
    failed: frozenset[Key] = frozenset()
    in_float64: InFloat64 | None = None
    nearby: float = 0.0
    usual_losses: Sequence[float] = ()
    usual_gradient: float = 0.0
    stays_within: bool = False
    within: str | None = None
    is_kept: bool = False
    losses: Sequence[float] = ()

    @property
    def failing_calls(self) -> list[TorchCall]:
        """The torch call that failed, if it is known; in backward, the forward's."""
        own = None if self.op is None else self.op.torch_call
        return [] if own is None else [own]

    @property
    def usual_loss(self) -> float | None:
        """The median loss of the steps before, or None."""
        losses = self.usual_losses
        return statistics.median_low(losses) if losses else None

    @property
    def is_meant(self) -> bool:
        """True if the loss holds the infs of a mask, and nothing else is wrong."""
        is_whole = self.found.phase == "forward"
        return is_whole and self.op is not None and self.op.is_meant

    @classmethod
    def of(
        cls, found: Explanation, root_op: RootOp, table: OpTable, place: int
    ) -> Failure:
        """Makes the failure of an origin that is explained.

        Args:
            found: The explanation.
            root_op: The origin.
            table: The operations of the replay in which it was found.
            place: The place of the call.
        """
        if not isinstance(root_op.source, OpCall):
            is_of_batch = root_op.source.kind == "batch"
            bad = root_op.source.tensor if is_of_batch else None
            return cls(
                *(found, None, place, bad),
                is_compiled=table.is_compiled,
                calls=table.torch_calls,
            )
        op, made = root_op.source.named, mask_of(root_op.source)
        details = root_op.source.details
        near, size = (details and details.num_near) or (0, 0)
        ran = [each.module for each in table.ops[op.index :] if each.module]
        failed = [each.named.torch_call for each in table.ops if each.makes_bad]
        return cls(
            *(found, op, place),
            modules=list(dict.fromkeys(ran)),
            mask=made if isinstance(made, OpCall) else None,
            growth=growth_of(root_op.source, table.ops) if found.is_overflow else None,
            leap=leap_before(root_op.source) if found.is_overflow else None,
            num_near=near if size == found.num_samples else 0,
            is_compiled=table.is_compiled,
            calls=table.torch_calls,
            failed=frozenset(each.key for each in failed if each is not None),
            in_float64=in_float64(table),
            nearby=_largest_in(e for made in op.read_from for e in made.read_from),
        )

    @property
    def mark(self) -> tuple[Any, ...]:
        """Its phase, operation, module and line, which tell it from others."""
        found, op = self.found, self.found.op
        if op is None:
            return found.phase, found.tensor
        keys = [call.key for call in self.failing_calls]
        return found.phase, found.module, op.file, op.line, op.name, *keys

    @property
    def is_complex(self) -> bool:
        """True if the call that failed was given complex numbers."""
        values = [value for call in self.failing_calls for value in call.inputs]
        return any(value.dtype.is_complex for value in values)

    @property
    def is_at_pole(self) -> bool:
        """True if the result is infinite in exact arithmetic, such as that of 1 / 0."""
        op, is_open = self.found.op, self.found.cause == UNDEFINED.name
        true_value = None if op is None else op.true_value
        return is_open and true_value is not None and math.isinf(true_value)

    @property
    def beyond_pole(self) -> float:
        """How far beyond a pole its argument is, if by more than rounding; else 0.

        Of what was drawn any number is to be expected.
        """
        op = self.found.op
        is_own = op is not None and len(op.operands) == 1 and not op.derivative
        if op is None or not is_own or self.found.cause != UNDEFINED.name:
            return 0.0
        before = [each for call in self.failing_calls for each in calls_before(call)]
        if any(has(each.name, "draws") for each in before):  # which has no bound
            return 0.0
        distance = beyond_pole(base_of(op.name), op.operands[0])
        most = tolerance(call.dtype for call in self.failing_calls) * self.nearby
        return distance if distance > most else 0.0

    @property
    def half(self) -> torch.dtype | None:
        """The half precision that the operation works in, where a wider one helps.

        bfloat16 rounds, and overflows no sooner than float32.
        """
        op = self.found.op
        tensors = [] if op is None else [*op.outputs, *op.inputs]
        dtypes = {each.dtype for each in tensors}
        may_help = HALF[:1] if self.found.is_overflow else HALF
        return next((each for each in may_help if dtype_name(each) in dtypes), None)
