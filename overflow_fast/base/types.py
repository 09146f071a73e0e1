"""Types that several rooms share: where a tensor is."""

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
