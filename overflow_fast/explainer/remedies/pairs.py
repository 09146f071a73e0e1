"""A remedy of two places: where a value is made, and where its logarithm is taken.

A forward returns softmax(A), and a line of another function takes the log of that. What
is stable needs A: so the forward returns A, each logarithm of it takes the stable form,
and whatever else reads the value in the step makes it there, as it was.

All of the step's logarithms of the value are changed at once, in the replay as in the
text. Where one of the places has no text, or the value is made in several places or is
moved on its way (`view`, `squeeze`), it is no pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..torch_calls import TorchCall, Value
from .call_patch import RuleChange
from .patterns import Found, Input, matched
from .rules import EXACT, RULES
from .source import Edit, NotWrittenError
from .written import Writer, rule_edits


@dataclass(frozen=True)
class LogarithmPair:
    """The changes of the step, and the edits that write them.

    Attributes:
        made: The call whose argument the program hands on then.
        changes: The logarithms, each in its stable form.
        edits: The edits of all places.
    """

    made: TorchCall
    changes: tuple[RuleChange, ...]
    edits: tuple[Edit, ...]

    @property
    def text(self) -> str:
        """The other changes, in words."""
        function, name = self.made.sites[0].code.co_name, self.made.plain_name
        return f"`{function}` then hands on the argument of {name}, to other code, too"


def pair_of(root: TorchCall, found: Found, calls: Sequence[TorchCall]) -> LogarithmPair:
    """The pair of a logarithm and what made its argument in another function.

    Args:
        root: The logarithm.
        found: Its stable form.
        calls: All calls of the step.

    Raises:
        NotWrittenError: If it is no such pair, or one of its places has no text.
    """
    code = root.sites[0].code
    far = {call for call in found.calls if call.sites[0].code is not code}
    made = next(iter(far), root)
    is_known = len(far) == len(made.inputs) == len(made.results) == 1
    is_method = hasattr(torch.Tensor, made.plain_name)  # so that it is made again
    if not (is_known and is_method) or made.is_in_place:
        raise NotWrittenError("it is made in several places")
    if sum(call.key == made.key for call in calls) != 1:
        raise NotWrittenError("it is made several times")
    readers = [call for call in calls if made.results[0] in call.inputs]
    if not readers:
        raise NotWrittenError("it is moved on its way")
    edits = [*rule_edits(made, calls, lambda call: Found("x", {"x": Input(call, 0)}))]
    changes, covered = dict[RuleChange, None](), set[TorchCall]()
    for call, rule, form in _logarithms(made, calls):
        near = _of_value(form, made, readers[0])
        edits += rule_edits(call, calls, lambda _, near=near: near)  # type: ignore[misc]
        covered |= {call, *form.calls}
        reads = frozenset(each.key for each in (call, *form.calls))
        changes[RuleChange(call.key, rule, call.dtype, 0.0, None, reads)] = None
    for reader in readers:
        users = {call for call in calls if set(reader.results) & {*call.inputs}}
        is_in_logarithm = reader in covered and not _has_other_users(users, covered)
        if not is_in_logarithm:
            edits += _made_again(made, reader, calls)
    return LogarithmPair(made, tuple(changes), tuple(dict.fromkeys(edits)))


def _has_other_users(users: set[TorchCall], covered: set[TorchCall]) -> bool:
    """True if what reads a value is read by more than the logarithms of it."""
    return not users <= covered and bool(users & covered)


def _logarithms(
    made: TorchCall, calls: Sequence[TorchCall]
) -> Iterator[tuple[TorchCall, int, Found]]:
    """The logarithms of a value, with their rules and stable forms."""
    for call in calls:
        if not call.plain_name.startswith("log") or call.is_in_place:
            continue
        for rule in EXACT:
            found = matched(rule, call, call.dtype)
            if found is not None and made in found.calls:
                yield call, RULES.index(rule), found
                break


def _of_value(form: Found, made: TorchCall, reader: TorchCall) -> Found:
    """A form with the value itself, which is A then, in place of A."""
    leaf = Input(reader, reader.operands.index(made.results[0]))

    def near(of: Any) -> Any:
        if isinstance(of, Found):
            if of.moved is not None:
                raise NotWrittenError("it is moved on its way")
            return replace(of, names={k: near(e) for k, e in of.names.items()})
        if isinstance(of, Input) and of.call is made:
            return leaf if isinstance(of.value, Value) else of.value
        return of

    changed: Found = near(form)
    return changed


def _made_again(
    made: TorchCall, reader: TorchCall, calls: Sequence[TorchCall]
) -> tuple[Edit, ...]:
    place = reader.operands.index(made.results[0])
    has_dim = len(made.operands) > 1
    names = {"x": Input(reader, place), "d": made.operands[1] if has_dim else None}
    form = Found(f"x.{made.plain_name}({'d' * has_dim})", names)
    writer = Writer(reader, calls)
    again = writer.with_operands(reader, {place: writer.written(form)})
    return writer.edits_to(again)
