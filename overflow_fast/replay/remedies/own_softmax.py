"""A softmax or its logarithm that is written out, in a form that cannot overflow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .source_file import Edit, SourceFile
from .value_flow import following, loads, statement_of, target_of
from .written import Written

_DIVISIONS = {"div", "divide", "true_divide"}
_Forms = Iterator[tuple[str, list[Edit]]]


@dataclass(frozen=True)
class _Sum:
    """A sum along a dimension: of what, along which, and whether that is kept."""

    of: ast.AST
    dim: str
    keeps: bool


def softmax_forms(source: SourceFile, node: ast.AST) -> _Forms:
    """Yields edits of the code around an exp that is summed up.

    Args:
        source: The file.
        node: The call of exp.
    """
    power = Written(source, node)
    if power.name != "exp" or not power.nodes:
        return
    argument = source.text_of(power.nodes[0])
    for each in source.around(node):
        if isinstance(each, ast.stmt):
            break
        found = _closed_form(source, node, each, argument)
        if found is not None:
            yield found
            return
    dim = _dim_of_later_sum(source, node)
    if dim:
        of = power.operands[0]
        less = f"({of} - {of}.amax({dim}, keepdim=True))"
        yield "less its maximum before exp", [Edit(node, power.with_operands(less))]


def _closed_form(
    source: SourceFile, node: ast.AST, whole: ast.AST, argument: str
) -> tuple[str, list[Edit]] | None:
    """The function of torch's that an expression around exp is, or None."""
    written, text = Written(source, whole), source.text_of(node)
    sums = [_sum_of(source, each) for each in written.nodes[:2]]
    if written.name == "log" and sums and sums[0] is not None:
        (total, keeps) = sums[0], ", keepdim=True" * sums[0].keeps
        if total.of is node:
            code = f"torch.logsumexp({argument}, {total.dim}{keeps})"
            return "torch.logsumexp", [Edit(whole, code)]
    if written.name in _DIVISIONS and len(sums) == 2 and sums[1] is not None:
        is_same = [source.text_of(e) == text for e in (written.nodes[0], sums[1].of)]
        if all(is_same) and sums[1].keeps:
            code = f"torch.softmax({argument}, {sums[1].dim})"
            return "torch.softmax", [Edit(whole, code)]
    return None


def _dim_of_later_sum(source: SourceFile, node: ast.AST) -> str:
    """The dimension along which a variable is summed that is divided by it, or ""."""
    statement = statement_of(source, node)
    name = target_of(statement, node)
    if statement is None or not name:
        return ""
    dims, num_used = [], 0
    reads = [r for each in following(source, statement) for r in loads(each, {name})]
    for read in reads:
        around = [e for e in source.around(read) if not isinstance(e, ast.Attribute)]
        total = _sum_of(source, around[0])
        if total is not None and total.of is read and total.keeps:
            dims.append(total.dim)
        written = Written(source, around[0])
        num_used += written.name in _DIVISIONS and written.nodes[0] is read
    is_ratio = len(dims) == 1 and num_used == 1 and len(reads) == 2
    return dims[0] if is_ratio else ""


def _sum_of(source: SourceFile, node: ast.AST) -> _Sum | None:
    written = Written(source, node)
    if written.name != "sum" or not isinstance(node, ast.Call):
        return None
    rest = [source.text_of(each) for each in written.nodes[1:]]
    dim = written.keyword("dim") or "".join(rest[:1])
    keeps = written.keyword("keepdim") or "".join(rest[1:2])
    return _Sum(written.nodes[0], dim, keeps == "True") if dim else None
