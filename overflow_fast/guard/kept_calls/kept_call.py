"""One call of a step, with what it takes to make it again."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch

from ... import _C
from ...base.tree import CALL_DEPTH, tensors_in
from ..undo.tensors import num_bytes
from ..watching.inputs import WeakTensor, hold
from .ambient import Ambient
from .function_marks import VALUES, marks_of
from .held_function import HeldFunction, given_in

# Of gradients, from forward to the verdict, and of a batch, from a clean step to the
# next one; chosen. Of an output that gets more, the backward is not run again, which a
# note says; without the batch, remedies are not tried on a healthy one.
_MAX_HELD_BYTES = 2**26
# Values of a tensor that is compared with itself later. A write that torch does not
# count, and that changes none of them, is not noticed.
NUM_SAMPLED = 64


class KeptCall:
    """One call of the step: of a model, or of a function that calls models.

    Attributes:
        function: The model, or a weak reference to it, or the `HeldFunction`.
        batch: What it is called with, in any nesting.
        ambient: What was set when it began.
        outputs: The tensors whose gradients are held, weakly.
        held: The gradients of what it returned, by their places among its tensors.
        not_held: How many bytes of gradients were too many to be held; 0 for none.
        num_held: How many gradients have come to it, of several backwards, too.
        has_graph: Whether one of them can be differentiated again, as for a penalty of
            gradients: what follows from it does not run where the call is made again.
        returns_loss: Whether backward is called on what it returned.
        is_part_of_compiled: Whether it ran in code that was compiled together with
            others', and runs eagerly when it is called alone.
        has_stand_ins: Whether other tensors stood in for the model's own weights, and
            do not when it is called again.
        called_at: The file and the line of the program that made it; "" and 0 if that
            is not known.
        was_overwritten: Whether the batch had been written to when the call was first
            made again; None before that.
        follows_others: Whether the loop had outputs of other forwards by then, whose
            backward had not come: it may have computed the arguments from them.
        began: The time of `time.perf_counter()` when it was called in a step; None
            where it was not seen to be called.
        has_backward: Whether one follows; False for a forward without autograd, whose
            output is all there is; None where a loss that it returns will tell.
        has_autograd: Whether it ran with autograd, where no backward follows.
        forwards: Of a function: the calls of models in it, which can be made again
            where the function itself cannot.
        has_returned: Whether it returned; False if an exception has left it.
        raised: The type of the exception that the program's code has raised in the
            step, in this call or behind it; None for none.
    """

    called_at = "", 0
    has_returned = True
    raised: type[Exception] | None = None
    follows_others = False
    began: float | None = None
    has_backward: bool | None = True
    has_autograd = False
    has_graph = False
    forwards: Sequence[Any] = ()

    def __init__(
        self,
        function: Any,
        batch: Any,
        ambient: Ambient,
        tensors: list[torch.Tensor] | None = None,
    ) -> None:
        self.function = function
        self.batch = batch
        self.ambient = ambient
        self.outputs: list[WeakTensor] = []
        self.held: dict[int, torch.Tensor] = {}
        self.not_held = self.num_held = 0
        self.returns_loss = False
        self.is_part_of_compiled = False
        self.has_stand_ins = False
        self.was_overwritten: bool | None = None
        self._tensors = given_in(batch, CALL_DEPTH) if tensors is None else tensors
        self._versions = _C.versions_of(self._tensors)
        self._samples = _C.samples_of(self._tensors, NUM_SAMPLED)

    @property
    def callee(self) -> Any:
        """The function; of a weak reference the model, or None if that is gone."""
        own = self.function
        return own() if isinstance(own, weakref.ref) else own

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the batch."""
        return self._tensors

    @property
    def samples(self) -> list[bytes | None]:
        """Some values of each of them, from when it was called; None if not known."""
        return self._samples

    @property
    def awaits_backward(self) -> bool:
        """True if no gradient has come to what it returned so far."""
        return not self.held and not self.not_held

    def hold_gradients(self, output: Any, loss: torch.Tensor | None) -> None:
        """Holds the gradients of the output, by reference, once they are there.

        Of the loss in it if there is one, else of all tensors up to a size.
        """
        self.returns_loss = loss is not None
        asked = [
            (place, tensor)
            for place, tensor in enumerate(tensors_in(output))
            if (loss is None or tensor is loss) and tensor.grad_fn is not None
        ]
        size = sum(tensor.nbytes for _, tensor in asked)
        if size > _MAX_HELD_BYTES:
            self.not_held = size
            return
        for place, tensor in asked:
            hook = functools.partial(self._hold, place)
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            self.outputs.append(hold(tensor))

    def _hold(self, place: int, gradient: torch.Tensor) -> None:
        self.held[place] = gradient
        self.num_held += 1
        self.has_graph |= torch.is_grad_enabled()  # in a backward that makes a graph

    def take_as_written(self, tensors: Set[int]) -> None:
        """Takes tensors of the batch, by their ids, for written to since the call."""
        self._versions = [
            -1 if id(tensor) in tensors else version
            for tensor, version in zip(self._tensors, self._versions, strict=True)
        ]

    @property
    def is_of_inference(self) -> bool:
        """True if a tensor of the batch is one that autograd refuses."""
        return any(each.is_inference() for each in self._tensors)

    def is_overwritten(self) -> bool:
        """True if the batch was written to since.

        Writes that torch does not count, as through NumPy, are seen on the CPU alone,
        if they change one of a few values.
        """
        if self.was_overwritten is not None:
            return self.was_overwritten
        tensors = self._tensors
        if _C.versions_of(tensors) != self._versions:
            return True
        return _C.samples_of(tensors, NUM_SAMPLED) != self._samples

    def was_written(self, tensor: torch.Tensor) -> bool:
        """True if a tensor of the batch was written to since; see `is_overwritten`."""
        places = [i for i, each in enumerate(self._tensors) if each is tensor]
        versions = _C.versions_of(self._tensors)
        samples = _C.samples_of(self._tensors, NUM_SAMPLED)
        return any(
            (versions[i], samples[i]) != (self._versions[i], self._samples[i])
            for i in places
        )

    def batch_alone(self) -> KeptCall | None:
        """Lets go of all but the batch, and keeps marks of the function.

        Returns:
            The call; None if its batch is large, or computed outside.
        """
        tensors = self._tensors
        is_large = sum(map(num_bytes, tensors)) > _MAX_HELD_BYTES
        if is_large or not tensors or any(each.grad_fn is not None for each in tensors):
            return None
        if isinstance(self.function, HeldFunction):
            given = self.function.given
            numbers = {k: each for k, each in given.items() if type(each) in VALUES}
            self.batch = {**numbers, **self.batch}
        self.function = marks_of(self.callee)
        self.held, self.outputs, self.forwards = {}, [], ()
        return self
