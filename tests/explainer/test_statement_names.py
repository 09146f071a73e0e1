"""Which names a statement writes, and which it reads."""

import ast

import pytest

from overflow_fast.explainer.statement_names import (
    assigned,
    assigned_itself,
    changed,
    read,
    written,
)

# A statement, the names that it writes, and those whose objects it writes to.
STATEMENTS = {
    "a = b": ("a", ""),
    "a, (b, *c) = d": ("a b c", ""),
    "a += b": ("a", ""),
    "a: int = b": ("a", ""),
    "a = (b := c)": ("a b", ""),
    "print(a := b)": ("a", ""),
    "a = [b for b in c]": ("a", ""),
    "a = [d := b for b in c]": ("a d", ""),
    "a = lambda b: (c := b)": ("a", ""),
    "for a, b in c: d = a": ("a b d", ""),
    "with a as b, c as (d, *e): f = b": ("b d e f", ""),
    "with a as b[0]: pass": ("", "b"),
    "try: a = b\nexcept E as c: d = a": ("a c d", ""),
    "while (a := b): c = a": ("a c", ""),
    "import a.b, c as d": ("a d", ""),
    "from a import b as c, d": ("c d", ""),
    "def a(b): c = b": ("a", ""),
    "@(a := b)\ndef c(): pass": ("a c", ""),
    "def a():\n    global b\n    b = 1": ("a b", ""),
    "class A: b = 1": ("A", ""),
    "del a, b[0], c.d": ("a", "b c"),
    "global a": ("a", ""),
    "a[0] = b": ("", "a"),
    "a.b.c = d": ("", "a"),
    "a[b], *c.d = e": ("", "a c"),
    "a[0] += b": ("", "a"),
    "for a[0] in b: pass": ("", "a"),
    "a.mul_(b)": ("", "a"),
    "a.view(-1).mul_(b)": ("", "a"),
    "torch.relu_(a)": ("", "a"),
    "nn.init.zeros_(a.b)": ("", "a"),
    "torch.add(a, b, out=c)": ("", "c"),
    "a.__init__(b)": ("", ""),
    "match a:\n    case [b, *c]: d = b\n    case {'k': e, **f}: pass": (
        "b c d e f",
        "",
    ),
    "match a:\n    case K(x=b) | L(b) as c: pass": ("b c", ""),
}


def statement(text):
    (found,) = ast.parse(text).body
    return found


@pytest.mark.parametrize("text", STATEMENTS)
def test_the_names_that_a_statement_writes(text):
    names, objects = (set(each.split()) for each in STATEMENTS[text])
    assert assigned(statement(text)) == names
    assert changed(statement(text)) == objects
    assert written(statement(text)) >= names | objects


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("for a in b: c = a", "a"),
        ("with a as b: c = b", "b"),
        ("if (a := b): c = a", "a"),
        ("try: a = b\nexcept E as c: pass", ""),
        ("match a:\n    case b: c = b", "b"),
        ("def a(): b = 1", "a"),
        ("a = b", "a"),
    ],
)
def test_a_block_is_not_written_by_its_head(text, names):
    assert assigned_itself(statement(text)) == set(names.split())


def test_inner_scopes_read_outer_names():
    assert read(statement("a = lambda b: b + c")) == {"b", "c"}


def test_what_is_appended_to_is_written():
    assert written(statement("a.append(b)")) == {"a"}
