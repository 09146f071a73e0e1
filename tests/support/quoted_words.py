"""Finds the asserts that quote sentences: a better word breaks them.

python tests/support/quoted_words.py [FOLDER ...]

lists how many each file has. What whole reports and pages say stands in golden files;
other tests ask for fields.
"""

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
LEAST = 4  # words that make a sentence


def quoting(path):
    """The lines of a file's asserts that quote so many words."""
    tree = ast.parse(path.read_text())
    asserts = [each for each in ast.walk(tree) if isinstance(each, ast.Assert)]
    return [each.lineno for each in asserts if any(map(_is_quote, ast.walk(each.test)))]


def _is_quote(node):
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and len(node.value.split()) >= LEAST


def count(folders=(TESTS,)):
    """How many such asserts each file below some folders has, the most first."""
    paths = [path for folder in folders for path in Path(folder).rglob("*.py")]
    found = {path: len(quoting(path)) for path in paths}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


if __name__ == "__main__":
    found = count(sys.argv[1:] or (TESTS,))
    for path, number in found.items():
        print(f"{number:5} {path}") if number else None
    print(f"{sum(found.values()):5} in all")
