"""The operation that failed, with its inputs and outputs, and the sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...base.source_files import short_name
from ...base.types import ValueCounts


@dataclass(frozen=True)
class TensorSummary(ValueCounts):
    """The values of one tensor in numbers.

    Attributes:
        shape: Its shape.
        abs_min: The smallest magnitude of its finite values, or None if there is none.
        abs_max: The largest one.
        name: What it was of before the step: "`fc.weight`" for a weight, a buffer or an
            input, "part of `fc.weight`"; or "".
    """

    shape: tuple[int, ...]
    abs_min: float | None = None
    abs_max: float | None = None
    name: str = ""


@dataclass
class Op:
    """An operation that turned finite values into non-finite ones.

    In backward, `name` is the operation of the forward whose derivative failed, and
    `inputs` and `outputs` are those of `derivative`, which computed it.

    Attributes:
        name: Its name, such as "aten.div.Tensor".
        file: The file of the line that called it, the user's and not torch's, or "".
        line: The number of that line, or 0.
        code: The line's text.
        stack: The lines that led to it, the outermost first.
        inputs: The float tensors that it was given.
        outputs: The float tensors that it returned.
        first_index: Where the first non-finite value is.
        true_value: The result in float64 at the worst place; None if it is not known.
        limit: The largest number of the output's dtype.
        derivative: In backward, the operation that ran, or "".
        called_from: Where `file` is of an installed package, the deepest line of the
            program that led there, such as "train.py:7: loss = model(x)"; else "".
        within: Where a function of torch's in Python called it, such as
            "`weight / sigma` (torch/nn/utils/spectral_norm.py:113)"; or "".
        columns: Where in `code` the expression that called it begins and ends; None if
            that is not known, as on Python 3.10.
        operands: The numbers that an elementwise operation was given at `first_index`.
        outside: Which input is outside of the operation's domain, and where, in words.
        value: Its own result where float64 has `true_value`; None if it is not finite
            or not known.
    """

    name: str
    file: str = ""
    line: int = 0
    code: str = ""
    stack: list[str] = field(default_factory=list)
    inputs: list[TensorSummary] = field(default_factory=list)
    outputs: list[TensorSummary] = field(default_factory=list)
    first_index: tuple[int, ...] | None = None
    true_value: float | None = None
    limit: float | None = None
    derivative: str = ""
    called_from: str = ""
    within: str = ""
    columns: tuple[int, int] | None = None
    operands: list[float] = field(default_factory=list)
    outside: str = ""
    value: float | None = None

    @property
    def place(self) -> str:
        """Its file and line, such as "attention.py:46", or ""."""
        return f"{short_name(self.file)}:{self.line}" if self.file else ""


class Sample(int):
    """The index of a sample in the batch.

    Attributes:
        dataset: Its index in the dataset, where the batch holds one; else None.
        outlier: How much larger its values are than those of the other samples, in
            words, where that is a hundredfold; else "".
    """

    dataset: int | None = None
    outlier: str = ""

    @classmethod
    def of(cls, index: int, dataset: int | None = None, outlier: str = "") -> Sample:
        """Makes one of its index in the batch and that in the dataset."""
        sample = cls(index)
        sample.dataset, sample.outlier = dataset, outlier
        return sample
