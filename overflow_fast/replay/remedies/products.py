"""Other forms of a product that overflows: scaled before it, or in float32."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from .failure import Failure
from .lines import edits_tried, expression_of
from .scaling import Scaling, scalings_of
from .source_file import Edit, SourceFile
from .trials import Trials
from .value_flow import PRODUCTS, later_softmax, outermost, softmax_around
from .written import Written, atom

# Where the factors of a product stand among the operands; a term that is added, too.
_TERMS = {"addmm", "baddbmm", "addbmm"}
_SECOND = _TERMS | {"einsum"}
_FACTORS = {name: (1, 2) if name in _SECOND else (0, 1) for name in PRODUCTS | {"mul"}}


class Product:
    """A product as it is written.

    Args:
        source: Its file.
        node: The expression.
    """

    def __init__(self, source: SourceFile, node: ast.AST) -> None:
        self._written = Written(source, node)
        operands = self._written.operands
        places: tuple[int, ...] = _FACTORS.get(self._written.name, ())
        has_bias = self._written.name == "linear" and (
            len(operands) > 2 or self._written.has_keyword("bias")
        )
        is_whole = len(operands) > max(places, default=0)
        is_whole = is_whole and not self._written.is_in_place
        self.places: tuple[int, ...] = places if is_whole and not has_bias else ()

    def scaled(self, by: str) -> str:
        """The product with its first factor, and a term, scaled."""
        return self._with(lambda text: f"({text} {by})", [*self._terms, self.places[0]])

    def in_float32(self) -> str:
        """The product of its factors in float32."""
        return self._with(
            lambda text: f"{atom(text)}.float()", [*self._terms, *self.places]
        )

    @property
    def _terms(self) -> list[int]:
        return [0] if self._written.name in _TERMS else []

    @property
    def back(self) -> str:
        """The code that casts a result to the dtype of the first factor."""
        factor = self._written.operands[self.places[0]]
        is_name = all(part.isidentifier() for part in factor.split("."))
        return f".to({factor}.dtype)" if is_name else ".half()"

    def _with(self, change: Any, places: Any) -> str:
        operands = self._written.operands
        changed = [
            change(text) if i in places else None for i, text in enumerate(operands)
        ]
        return self._written.with_operands(*changed)


def of_products(failure: Failure, trials: Trials) -> Iterator[Any]:
    """Forms of a product in the forward in which it stays in range."""
    row = failure.row
    if row is None or failure.found.phase != "forward":
        return
    source, node = expression_of(row, trials.ground)
    if source is None or node is None:
        return
    product = Product(source, node)
    if not product.places:
        return
    for scaling in scalings_of(source, node):
        text = f"{scaling.by} before the product"
        edits = _scaled(source, node, product, scaling)
        yield edits_tried(text, edits, source, row, trials)
    if failure.is_half:
        for text, edits in _in_float32(source, node, product):
            yield edits_tried(text, edits, source, row, trials)


def _scaled(
    source: SourceFile, node: ast.AST, product: Product, scaling: Scaling
) -> list[Edit]:
    """The edits that scale before the product, and no more after it."""
    new, run = product.scaled(scaling.by), product.scaled(scaling.checked)
    if scaling.rest is not None:
        return [Edit(node, new, run), Edit(scaling.whole, scaling.rest)]
    inner = scaling.scaled
    return [
        Edit(
            scaling.whole,
            source.text_with(inner, node, new),
            source.text_with(inner, node, run),
        )
    ]


def _in_float32(
    source: SourceFile, node: ast.AST, product: Product
) -> Iterator[tuple[str, list[Edit]]]:
    """As far as the softmax, or else to the end of the expression."""
    wide = product.in_float32()
    softmax = softmax_around(source, node)
    if softmax is not None:
        text = source.text_with(softmax, node, wide)
        yield "attention in float32", [Edit(softmax, f"{text}{product.back}")]
        return
    softmax = later_softmax(source, node)
    if softmax is not None:
        text = source.text_of(softmax)
        edits = [Edit(node, wide), Edit(softmax, f"{text}{product.back}")]
        yield "attention in float32", edits
        return
    whole = outermost(source, node)
    if whole is not node:
        text = source.text_with(whole, node, wide)
        yield "float32 as far as its end", [Edit(whole, f"({text}){product.back}")]
