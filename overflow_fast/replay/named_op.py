"""The operation that failed, with its inputs and outputs, and the sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.notebook import short_name


@dataclass(frozen=True)
class TensorSummary:
    """The values of one tensor in numbers.

    Attributes:
        dtype: Its dtype, such as "float16".
        shape: Its shape.
        abs_min: The smallest magnitude of its finite values, or None if there is none.
        abs_max: The largest one.
        num_nan: How many of its elements are nan.
        num_inf: How many are inf or -inf.
        name: The argument of the operation that it was, or "".
    """

    dtype: str
    shape: tuple[int, ...]
    abs_min: float | None
    abs_max: float | None
    num_nan: int
    num_inf: int
    name: str = ""

    @property
    def numel(self) -> int:
        """How many elements it has."""
        count = 1
        for size in self.shape:
            count *= size
        return count


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

    @property
    def place(self) -> str:
        """Its file and line, such as "attention.py:46", or ""."""
        return f"{short_name(self.file)}:{self.line}" if self.file else ""


class Sample(int):
    """The index of a sample in the batch.

    Attributes:
        dataset: Its index in the dataset, where the batch holds one; else None.
    """

    dataset: int | None = None

    @classmethod
    def of(cls, index: int, dataset: int | None = None) -> Sample:
        """Makes one of its index in the batch and that in the dataset."""
        sample = cls(index)
        sample.dataset = dataset
        return sample
