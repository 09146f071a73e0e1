"""Who can have made the first bad gradient, by autograd's graph and the calls."""

from __future__ import annotations

from collections.abc import Iterable

from .. import _C
from .calls import Called, Calls, ancestors, joined, name_of
from .verdict import BATCH, LOOP, LOSS, BadFrame, Origin

_Owner = Called | str


def origin_of_gradient(first: BadFrame, calls: Calls) -> Origin:
    """Who made the gradient of an output, which is the first bad one.

    Args:
        first: Its frame. All gradients of outputs that were looked at before it are
            finite.
        calls: The calls of all watched models.

    Returns:
        The one who must have made it, or all who can have.
    """
    region = first.watch.region_of(first.frame)
    here = name_of(first.watch, first.frame.module)
    if region is None or calls.has_traced:
        return _by_order(first, calls, here)
    walk = _Owners(region, calls)
    owners = walk.all()
    if region.reaches_root and LOSS not in owners:
        owners.append(LOSS)
    if region.reaches_root and _is_recomputed(first, calls):
        owners += list(_around(first))
    names = list(dict.fromkeys(_name(owner) for owner in owners))
    if region.has_foreign_hooks and here not in names:
        names.append(here)
    is_sure = not region.has_foreign_hooks and not walk.has_foreign_hooks
    if len(names) == 1 and is_sure:
        return _fact(owners[0], walk, first)
    return _unclear(names, owners, walk, here, region.has_foreign_hooks)


class _Owners:
    """The owners of a region's nodes: those whose code made them.

    Attributes:
        own: The calls that made nodes between or after the calls of their submodules.
        near: The modules whose outputs' gradients bound the region.
    """

    def __init__(self, region: _C.Region, calls: Calls) -> None:
        self._region = region
        self._calls = calls
        self._known: dict[tuple[int, int], bool] = {}
        self.own: set[str] = set()
        self.near: list[str] = []
        self.has_foreign_hooks = any(n.has_foreign_hooks for n in region.nodes)

    def all(self) -> list[_Owner]:
        """Each owner once, the nearest to the gradient first."""
        owners: dict[str, _Owner] = {}
        for place, node in enumerate(self._region.nodes):
            for owner in self._of_node(place, node):
                owners.setdefault(_name(owner), owner)
            for name in self._calls.names_of_outputs(node.outputs):
                if name not in self.near:
                    self.near.append(name)
        return list(owners.values())

    def _of_node(self, place: int, node: _C.RegionNode) -> list[_Owner]:
        found = self._calls.around_node(node.thread, node.sequence)
        inside = [o for o in found if self._is_inside(place, o)]
        owners = inside[:1] or found
        for owner in owners:
            if isinstance(owner, Called) and self._calls.last_within(owner):
                self.own.add(owner.name)
        return owners

    def _is_inside(self, start: int, called: _Owner) -> bool:
        """Whether all that a node led to went out through a call's own output."""
        if isinstance(called, str):
            return False
        nodes = self._region.nodes
        module = called.watch.recorder.id, called.call.module
        todo, seen, has_exit = [start], {start}, False
        while todo:
            node = nodes[todo.pop()]
            call = called.call
            if not call.begins_after <= node.sequence < call.ends_before:
                return False
            if node.thread != call.thread or any(out != module for out in node.outputs):
                return False
            if not node.outputs and not node.consumers:
                return False
            has_exit |= bool(node.outputs)
            todo += [c for c in node.consumers if c not in seen]
            seen.update(node.consumers)
        return has_exit


def _fact(owner: _Owner, walk: _Owners, first: BadFrame) -> Origin:
    if isinstance(owner, str):
        return loss_origin(first, "the backward of the loss")
    name = _name(owner)
    if name in walk.own:
        maker = f"the backward of {name}'s own code"
        return Origin("passed_on", "caller", maker, [name], _near(walk, name))
    return Origin("passed_on", "module", f"the backward of {name}", [name])


def _unclear(
    names: list[str], owners: list[_Owner], walk: _Owners, here: str, has_hook: bool
) -> Origin:
    words = []
    for name in names:
        if name == here and has_hook:
            words.append(f"a hook on the output of {here}")
        elif name in (LOSS, LOOP):
            words.append(name)
        elif name in walk.own:
            words.append(f"the code of {name}")
        else:
            words.append(f"the backward of {name}")
    if LOSS in names:
        names = [*names, BATCH]
    near = _near(walk, here)
    between = f"between {near} and {here}: " if near else ""
    return Origin("unclear", "unclear", f"{between}{joined(words)}", names, near)


def loss_origin(first: BadFrame, maker: str) -> Origin:
    """What arose after the model: in the loss, or in what it was given besides."""
    if first.watch.has_seen_loss:
        return Origin("passed_on", "loss", maker, [LOSS])
    maker = f"{maker}, or values that never went through the model, such as labels"
    return Origin("passed_on", "loss", maker, [LOSS, BATCH])


def _by_order(first: BadFrame, calls: Calls, here: str) -> Origin:
    """All who can have made it, by the order of calls alone."""
    called = calls.last_of(first.watch, first.frame.module, first.frame.order)
    names = list(_around(first)) if called is None else calls.users(called)
    names = list(dict.fromkeys([*names, *loss_origin(first, "").candidates]))
    maker = f"what was computed from the output of {here}: {joined(names)}"
    return Origin("unclear", "unclear", maker, names)


def _near(walk: _Owners, besides: str) -> str:
    return next((name for name in walk.near if name != besides), "")


def _name(owner: _Owner) -> str:
    return owner if isinstance(owner, str) else owner.name


def _around(first: BadFrame) -> Iterable[str]:
    indices = ancestors(first.watch, first.frame.module)
    return (name_of(first.watch, index) for index in indices)


def _is_recomputed(first: BadFrame, calls: Calls) -> bool:
    """Whether its graph may be one that backward computed, which has a root inside."""
    called = calls.last_of(first.watch, first.frame.module, first.frame.order)
    return called is None or called.call.phase == _C.Phase.RECOMPUTED
