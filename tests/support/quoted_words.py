"""Finds the checks of tests that quote sentences: a better word breaks them.

python tests/support/quoted_words.py [FOLDER ...]

lists how many each file has. What users read stands in golden files, of whole runs and
of single tests (`as_kept`); other checks ask for fields. It counts asserts, `match=`,
and what is given to functions of the same file that assert it, also where the sentence
has a name or is a parameter of the test.
"""

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
LEAST = 4  # words that make a sentence


def quoting(path):
    """The lines of a file's checks that quote so many words."""
    tree = ast.parse(path.read_text())
    known = _named(tree.body)
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    asserting = {each.name: _asserted(each) for each in functions}
    lines = set()
    for part in tree.body:
        own = _local(part) if isinstance(part, ast.FunctionDef) else set()
        for node in ast.walk(part):
            if any(_quotes(each, known | own) for each in _checked(node, asserting)):
                lines.add(node.lineno)
    return sorted(lines)


def _checked(node, asserting):
    """The expressions of a node that are compared with what a program says."""
    if isinstance(node, ast.Assert):
        yield node.test
    if not isinstance(node, ast.Call):
        return
    yield from (each.value for each in node.keywords if each.arg == "match")
    at = asserting.get(node.func.id, {}) if isinstance(node.func, ast.Name) else {}
    yield from (each for i, each in enumerate(node.args) if i in at.values())
    yield from (each.value for each in node.keywords if each.arg in at)


def _asserted(function):
    """The parameters of a helper that it asserts something of, and their places."""
    if function.name.startswith("test_"):
        return {}
    places = {each.arg: i for i, each in enumerate(function.args.args)}
    asserts = [each for each in ast.walk(function) if isinstance(each, ast.Assert)]
    read = {each.id for a in asserts for each in ast.walk(a.test) if _is_name(each)}
    return {name: place for name, place in places.items() if name in read}


def _named(statements):
    """The names that a file gives to sentences."""
    names = set()
    for each in statements:
        if isinstance(each, ast.Assign):
            values = getattr(each.value, "elts", [each.value])
            targets = [target.id for target in each.targets if _is_name(target)]
            names |= set(targets) if any(map(_is_sentence, values)) else set()
    return names


def _local(function):
    """The names of sentences in a test: its own, and parameters in some cases."""
    names = _named(ast.walk(function))
    for each in function.decorator_list:
        if isinstance(each, ast.Call) and each.args and len(each.args) > 1:
            names |= _sentences_of(*each.args[:2])
    return names


def _sentences_of(named, cases):
    """The names of `parametrize` whose values are sentences in some case."""
    try:
        names = ast.literal_eval(named)
    except ValueError:
        return set()
    names = names.split(",") if isinstance(names, str) else names
    names = [each.strip() for each in names]
    found = set()
    for case in getattr(cases, "elts", []):
        case = case.args[0] if isinstance(case, ast.Call) and case.args else case
        values = getattr(case, "elts", [case]) if len(names) > 1 else [case]
        found |= {n for n, v in zip(names, values, strict=False) if _is_sentence(v)}
    return found


def _quotes(expression, names):
    return any(
        _is_sentence(each) or (_is_name(each) and each.id in names)
        for each in ast.walk(expression)
    )


def _is_name(node):
    return isinstance(node, ast.Name)


def _is_sentence(node):
    """True for a text of so many words, also with values among them."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [each.value for each in parts if isinstance(each, ast.Constant)]
    words = " ".join(each for each in texts if isinstance(each, str)).split()
    return len(words) >= LEAST


def count(folders=(TESTS,)):
    """How many such checks each file below some folders has, the most first."""
    paths = [path for folder in folders for path in Path(folder).rglob("*.py")]
    found = {path: len(quoting(path)) for path in paths}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


if __name__ == "__main__":
    found = count(sys.argv[1:] or (TESTS,))
    for path, number in found.items():
        print(f"{number:5} {path}") if number else None
    print(f"{sum(found.values()):5} in all")
