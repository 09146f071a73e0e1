"""Types that several rooms share: where a tensor is, and how many values it has."""

from __future__ import annotations

from dataclasses import dataclass

_OF_CALLS = ("input", "output", "grad_output")


@dataclass(frozen=True)
class TensorPath:
    """Where a tensor is: a module, its role there, and the path that leads to it.

    `str()` of it names the tensor in records, pages and comparisons. Sentences of
    reports (`in_words()`) and rules (`rule_label`) need forms of their own, and say
    why.

    Attributes:
        module: The qualified name of the module; "" is the model, or none.
        role: "input", "output" or "grad_output" of a call; "weight", "buffer",
            "gradient" or "optimizer_state"; "recorded" for a loss or what `record()`
            was given. Recordings have roles of their own: see `StepPath`.
        path: The path within what the call was given or returned, such as `[0]['x']`;
            else the tensor's name in the module, such as "weight".
    """

    module: str
    role: str
    path: str

    @classmethod
    def from_label(cls, module: str, role: str, label: str) -> TensorPath:
        """Makes the path of a module's tensor by its `label`."""
        return cls(module, role, label.removeprefix(role * (role in _OF_CALLS)))

    @classmethod
    def from_fqn(cls, role: str, fqn: str) -> TensorPath:
        """Makes the path of a tensor that belongs to no call, by its qualified name."""
        module, _, path = fqn.rpartition(".")
        return cls(module, role, path)

    @property
    def is_of_call(self) -> bool:
        """True for what a call of the module was given or returned."""
        return self.role in _OF_CALLS

    @property
    def label(self) -> str:
        """The tensor in its module: `output[0]` or `weight`."""
        return f"{self.role}{self.path}" if self.is_of_call else self.path

    @property
    def in_module(self) -> str:
        """The tensor as lists below a module name it: `gradient of weight`."""
        is_derived = self.role in ("gradient", "optimizer_state")
        return f"{self.role.replace('_', ' ')} of " * is_derived + self.label

    @property
    def fqn(self) -> str:
        """The qualified name of a tensor that belongs to no call."""
        return f"{self.module}.{self.path}" if self.module else self.path

    @property
    def rule_label(self) -> str:
        """The label in rules, where each begins with the role: `weight.bias`."""
        return self.label if self.is_of_call else f"{self.role}.{self.path}"

    @property
    def rule(self) -> str:
        """The key of a rule for it."""
        return f"{self.module}:{self.rule_label}"

    def of_module(self, quote: str = "") -> str:
        """Writes `output[0] of h.0.attn`, with quotes around its label."""
        return f"{quote}{self.label}{quote} of {self.module or 'the model'}"

    def in_words(self) -> str:
        """Writes the path for a sentence, in which a colon would end the subject."""
        if self.is_of_call:
            return self.of_module()
        return f"gradient of {self.fqn}" if self.role == "gradient" else self.fqn

    def __str__(self) -> str:
        """The tensor's name in lists, such as `h.0.attn: output[0]`."""
        module = self.module or "the model" * self.is_of_call
        return f"{module}: {self.in_module}" if module else self.in_module


@dataclass(frozen=True, kw_only=True)
class ValueCounts:
    """The number of a tensor's values, and of those that are not finite.

    Attributes:
        dtype: The tensor's dtype, such as "float16".
        numel: How many elements it has.
        num_nan: How many of its elements are nan; -1: some, it is not known how many.
        num_inf: How many are inf or -inf; -1 as above.
        signs: Those of its infs: "+", "-", "+-", or "" if there are none.
    """

    dtype: str = ""
    numel: int = 0
    num_nan: int = 0
    num_inf: int = 0
    signs: str = ""

    @property
    def is_finite(self) -> bool:
        """True if none of its elements is nan, inf or -inf."""
        return not (self.num_nan or self.num_inf)

    def nonfinite_text(self, has_numel: bool = True) -> str:
        """Writes how many values are not finite: `1 nan and 24 -inf of 32 values`."""
        numel = self.numel if has_numel else 0
        both = "infinite" if numel else "infinite values"
        infs = {"-": "-inf", "+-": both}.get(self.signs, "inf")
        kinds = (self.num_nan, "nan"), (self.num_inf, infs)
        counts = " and ".join(
            f"{count} {kind}" if count > 0 else kind for count, kind in kinds if count
        )
        return f"{counts}{f' of {numel} values' * (numel > 0)}"
