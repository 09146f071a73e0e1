"""Numbers that decide something have a reason, or a measurement, beside them."""

import ast
import io
import tokenize
from pathlib import Path

import overflow_fast

PACKAGE = Path(overflow_fast.__file__).parent
# Their reasons are in the module's docstring, or they are parts of formulas.
ELSEWHERE = {"explainer/remedies"}
_PARTS = (
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.Tuple, ast.operator, ast.unaryop),
    *(ast.Call, ast.Name, ast.Attribute, ast.expr_context),
)


def is_number(value):
    """True for a number, several, or an expression of them."""
    parts = list(ast.walk(value))
    numbers = [
        p.value
        for p in parts
        if isinstance(p, ast.Constant) and type(p.value) in (int, float)
    ]
    is_call = isinstance(value, ast.Call) and not (
        isinstance(value.func, ast.Attribute) and value.func.attr == "log"
    )
    return bool(numbers) and all(isinstance(p, _PARTS) for p in parts) and not is_call


def commented_lines(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


def bare_numbers(source):
    """The module-level numbers without a comment beside or above them."""
    lines, commented = source.splitlines(), commented_lines(source)
    found = []
    for node in ast.parse(source).body:
        is_assigned = isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value
        if not is_assigned or not is_number(node.value):
            continue
        above = node.lineno - 1
        while above and lines[above - 1].strip() and above not in commented:
            above -= 1
        beside = commented & {*range(node.lineno, node.end_lineno + 1)}
        if not beside and above not in commented:
            found.append(lines[node.lineno - 1])
    return found


def test_each_number_has_its_reason():
    found = {
        str(path.relative_to(PACKAGE)): bare_numbers(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.parent.relative_to(PACKAGE)) not in ELSEWHERE
    }
    assert {path: numbers for path, numbers in found.items() if numbers} == {}


def test_numbers_without_a_reason_are_found():
    source = (
        '"""A."""\n\n_A = 3  # chosen\n\n_B = 2**20\n\n# Of a matrix.\n_C, _D = 1, 2\n'
    )
    assert bare_numbers(source) == ["_B = 2**20"]
