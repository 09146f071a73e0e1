"""Rules for expected non-finite values: `allow={"*.attn:output": "-inf"}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ... import _C
from ...base.tree import dotted, entry_label
from ...base.types import TensorPath
from ...detector.selection import NoModuleError, example_of
from ..watching.watch import ModelWatch
from .roles import FORWARDS, OF_CALLS, kind_of

Allow = Mapping[str, str | Iterable[str]]
KINDS = {
    "-inf": _C.NEGATIVE_INF,
    "+inf": _C.POSITIVE_INF,
    "inf": _C.NEGATIVE_INF | _C.POSITIVE_INF,
    "nan": _C.NAN,
}
_ROOTS = [kind_of(role) for role in _C.Role.__members__.values()]


def tensor_path(names: Sequence[str], place: _C.Place) -> TensorPath:
    """Makes the path of an entry of a recorder.

    Args:
        names: The qualified names of the model's modules, by index.
        place: The entry's.
    """
    role, label = place.label.role, entry_label(place)
    module = names[place.module] if place.module < len(names) else ""
    if is_output(place):
        return TensorPath.from_label(module, "output", label)
    if role not in OF_CALLS and place.kind not in FORWARDS:
        return state_path(() if role == _C.Role.RECORDED else names, role, label)
    return TensorPath.from_label(module, kind_of(role), label)


def is_output(place: _C.Place) -> bool:
    """True for an output, also where it was recorded alone, as by a tripwire."""
    name, role = place.label.name, place.label.role
    is_recorded = role == _C.Role.RECORDED and name.split("[")[0] == "output"
    return role == _C.Role.OUTPUT or is_recorded


def state_path(names: Iterable[str], role: _C.Role, fqn: str) -> TensorPath:
    """Makes the path of a tensor that belongs to no call.

    Args:
        names: The qualified names of the model's modules.
        role: The tensor's.
        fqn: Its qualified name: that of its module, and its own.
    """
    owners = [name for name in names if fqn.startswith(f"{name}.")]
    module = max(owners, key=len, default="")
    label = fqn[len(module) + 1 :] if module else fqn
    return TensorPath.from_label(module, kind_of(role), label)


@dataclass
class _Rule:
    text: str
    module: str
    label: str
    kinds: int
    has_matched: bool = False


class Rules:
    """The rules of a guard.

    Args:
        allow: The allowed values, by "module:entry". The first is a pattern of
            qualified names of modules, the second one of labels, in which `[x]`,
            `['x']` and `.x` are the same. The values are "-inf", "+inf", "inf" for
            both, "nan", or several of them.

    Raises:
        TypeError, ValueError: If `allow` has another form.
    """

    def __init__(self, allow: Allow) -> None:
        if not isinstance(allow, Mapping):
            raise TypeError(
                "allow must be a dict such as {'*.attn:input[attn_mask]': '-inf'}, got "
                f"{type(allow).__name__}"
            )
        self._rules = [_rule_of(text, kinds) for text, kinds in allow.items()]
        self._masks = set[TensorPath]()

    def __bool__(self) -> bool:
        return bool(self._rules or self._masks)

    def check(self, names: Iterable[str]) -> None:
        """Raises NoModuleError for a rule that matches no module."""
        names = list(names)
        for rule in self._rules:
            if not any(fnmatchcase(name, rule.module) for name in names):
                raise NoModuleError(
                    f"allow: the rule {rule.text!r} must begin with a pattern of "
                    f"module names{example_of(names)} ('' is the model itself); "
                    f"{rule.module!r} matches none"
                )

    def to_dict(self) -> dict[str, str | list[str]]:
        """Returns the rules, in the form that `allow` takes."""
        return {rule.text: kinds_text(rule.kinds) for rule in self._rules}

    def unused(self) -> list[str]:
        """Lists the rules that nothing has matched yet."""
        return [rule.text for rule in self._rules if not rule.has_matched]

    def allowed(self, path: TensorPath) -> int:
        """Returns the kinds of non-finite values that a place may hold, as bits."""
        kinds = _C.NEGATIVE_INF if path in self._masks else 0
        for rule in self._rules:
            is_there = fnmatchcase(path.module, rule.module)
            if is_there and fnmatchcase(dotted(path.rule_label), rule.label):
                rule.has_matched = True
                kinds |= rule.kinds
        return kinds

    def let_through(self, masks: Iterable[TensorPath], watch: ModelWatch) -> None:
        """Allows -inf at places from now on."""
        self._masks.update(masks)
        self.put_on(watch)

    def put_on(self, watch: ModelWatch) -> None:
        """Makes a watch's recorder follow the rules."""
        watch.follow_rules(self._reader if self else None)

    def _reader(self, names: Sequence[str]) -> Callable[[_C.Place], int]:
        # Must not refer to the recorder, which the garbage collector cannot see into.
        return lambda place: self.allowed(tensor_path(names, place))


def kinds_text(kinds: int) -> str | list[str]:
    """Writes kinds in the form that `allow` takes."""
    texts = [text for text in ("-inf", "+inf", "nan") if kinds & KINDS[text]]
    if kinds & KINDS["inf"] == KINDS["inf"]:
        texts = ["inf", *texts[2:]]
    return texts[0] if len(texts) == 1 else texts


def _rule_of(text: object, kinds: str | Iterable[str]) -> _Rule:
    if not isinstance(text, str) or ":" not in text:
        raise ValueError(
            "allow must have keys such as '*.attn:input[attn_mask]' (a module's name, "
            f"a colon, one of its entries), got {text!r}"
        )
    module, _, label = text.partition(":")
    label = dotted(label)
    root = re.split(r"[.*?]", label)[0]
    is_open = label[: len(root) + 1].endswith(("*", "?"))
    if not any(
        known.startswith(root) if is_open else known == root for known in _ROOTS
    ):
        raise ValueError(
            f"allow: the entry of {text!r} must begin with one of {', '.join(_ROOTS)}, "
            f"got {label!r}"
        )
    return _Rule(text, module, label, _bits_of(text, kinds))


def _bits_of(text: str, kinds: str | Iterable[str]) -> int:
    several = [kinds] if isinstance(kinds, str) else kinds
    try:
        bits = [KINDS[kind] for kind in several]
    except (KeyError, TypeError):
        bits = []
    if not bits:
        raise ValueError(
            f"allow[{text!r}] must be '-inf', '+inf', 'inf', 'nan' or a list of these, "
            f"got {kinds!r}"
        )
    union = 0
    for bit in bits:
        union |= bit
    return union
