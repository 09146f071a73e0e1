"""Writes what the site is built of: docs/, pages from elsewhere, and links that hold.

python docs/tools/site_pages.py

The README, the changelog and others stay where readers of the repository look for them;
in build/pages they are pages, and the public names have one. A link to a file that is
no page keeps its text alone.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/AGREEMENT.md": "agreement.md",
}
_API = """# API

Every public name, from its docstrings. What each argument of the guard and of the
detector means in practice is in [arguments](arguments.md).

"""
_INTEGRATION = re.compile(r"(guard_with|\w+GuardCallback|install|\w+Metrics)$")
_FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def write_pages() -> None:
    """Writes all pages anew, with what they show."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES, ignore=shutil.ignore_patterns("tools"))
    for source, place in OUTSIDE.items():
        (PAGES / place).write_text((ROOT / source).read_text())
    (PAGES / "api.md").write_text(_api())
    for path in PAGES.rglob("*.md"):
        place = path.relative_to(PAGES).as_posix()
        parts = _FENCE.split(path.read_text())
        parts[::2] = [_with_links_of_the_site(each, place) for each in parts[::2]]
        path.write_text("".join(parts))


def _api() -> str:
    names = [f"overflow_fast.{place}" for place in public_places()]
    names += [f"overflow_fast.integrations.{name}" for name in integrations()]
    return _API + "\n".join(f"::: {name}\n" for name in names)


def public_places() -> list[str]:
    """The public names, without importing the package, the guard first."""
    tree = ast.parse((ROOT / "overflow_fast" / "__init__.pyi").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return sorted(names, key=lambda name: (name != "OverflowGuard", name))


def integrations() -> list[str]:
    """The names that programs take of `overflow_fast.integrations`, by module."""
    return [
        f"{path.stem}.{node.name}"
        for path in sorted((ROOT / "overflow_fast" / "integrations").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        if _INTEGRATION.match(node.name)
    ]


def _with_links_of_the_site(text: str, place: str) -> str:
    sources = {place: source for source, place in OUTSIDE.items()}
    folder = posixpath.dirname(sources.get(place, f"docs/{place}"))

    def rewritten(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        path, hash_, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        source = posixpath.normpath(posixpath.join(folder, path))
        there = OUTSIDE.get(source, source.removeprefix("docs/"))
        is_page = source in OUTSIDE or source.startswith("docs/")
        if not is_page and (ROOT / source).exists():
            return label
        link = posixpath.relpath(there, posixpath.dirname(place) or ".")
        return f"{mark}[{label}]({link}{hash_}{anchor})"

    return _LINK.sub(rewritten, text)


if __name__ == "__main__":
    write_pages()
