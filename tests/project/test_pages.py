"""What the README and the pages of docs/ name is there: pages, anchors, arguments."""

import importlib.util
import inspect
import re
import shlex

import pytest
from pages import ROOT, anchors, examples, guides, links, pages, section, slug

from overflow_fast import DebugUnderflowOverflow, OverflowGuard
from overflow_fast.guard.monitors.running import DEFAULT_MONITORS
from overflow_fast.tools.cli.command_line import make_parser

pytestmark = pytest.mark.day  # a contract: all of its cases


def linking_pages():
    others = [
        "examples/README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "AGENTS.md",
        "llms.txt",
        "benchmarks/README.md",
        "overflow_fast/torch_internals/README.md",
    ]
    return pages() | {page: (ROOT / page).read_text() for page in others}


def test_anchors_are_those_of_github():
    assert slug("Trainer's debug flag") == "trainers-debug-flag"
    assert slug("Does it work on my model?") == "does-it-work-on-my-model"
    assert slug("What it writes: `log=`, JSON") == "what-it-writes-log-json"


@pytest.mark.parametrize("page", linking_pages())
def test_links_lead_somewhere(page):
    text = linking_pages()[page]
    for link in links(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", ["AGENTS.md", "llms.txt"])
def test_pages_for_agents_are_short(page):
    assert len((ROOT / page).read_text().splitlines()) <= 60


FILE = re.compile(r"[\w./{},*-]+\.(py|h|cpp|cu|cuh|inc|metal|html|css|js|pyi)")


def _expanded(path):
    found = re.search(r"\{([^{}]*)\}", path)
    if found is None:
        return [path]
    before, after = path[: found.start()], path[found.end() :]
    return [
        each
        for part in found[1].split(",")
        for each in _expanded(before + part + after)
    ]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/how-it-works.md"])
def test_files_that_a_page_names_exist(page):
    named = re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())
    paths = [each for name in named if FILE.fullmatch(name) for each in _expanded(name)]
    assert len(paths) > 20
    for path in paths:
        folders = (
            "",
            "overflow_fast/",
            "overflow_fast/**/",
            "csrc/**/",
            "benchmarks/**/",
        )
        assert any(any(ROOT.glob(folder + path)) for folder in folders), path


@pytest.mark.parametrize("page", pages())
def test_no_anchor_stands_for_two_headings(page):
    found = anchors(pages()[page])
    assert len(set(found)) == len(found)


def test_the_readme_is_short_and_leads_to_every_page():
    readme = pages()["README.md"]
    assert readme.count("\n") <= 190
    found, new = set(), {"README.md"}
    while new:
        found |= new
        new = {to for page in new for to in _pages_linked_from(page)} - found
    assert found == set(pages())


def _pages_linked_from(page):
    folder = (ROOT / page).parent
    for link in links(pages()[page]):
        target = (folder / link.partition("#")[0]).resolve()
        place = target.relative_to(ROOT).as_posix() if ROOT in target.parents else ""
        if place in pages():
            yield place


def test_pages_with_examples_have_tests_of_their_own():
    found = {place.partition("#")[0] for place in examples()} - set(guides())
    help_pages = {
        "getting-started",
        "my-run-is-nan",
        "reading-a-report",
        "how-it-works",
    }
    translated = {"zh/my-run-is-nan", "ko/my-run-is-nan"}
    pages_ = {f"docs/{name}.md" for name in help_pages | translated}
    # test_readme.py, test_guide.py, test_help_pages.py
    assert found == {"README.md"} | pages_


@pytest.mark.parametrize(
    "anchor, function",
    [
        ("debugunderflowoverflow", DebugUnderflowOverflow),
        ("overflowguard", OverflowGuard),
    ],
)
def test_every_argument_is_listed_with_its_default(anchor, function):
    rows = re.findall(r"^\| (`.*?) \|", section("docs/arguments.md", anchor), re.M)
    listed = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    parameters = [
        p
        for p in inspect.signature(function).parameters.values()
        if not p.name.startswith("_")
    ]
    shown = {p.name if p.name == "watch" else _shown(p) for p in parameters}
    default = ", ".join(f"{type(each).__name__}()" for each in DEFAULT_MONITORS)
    shown = {f"monitors=({default})" if "monitors" in s else s for s in shown}
    assert sorted(listed) == sorted(shown)


def _shown(parameter):
    if parameter.default is inspect.Parameter.empty:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}".replace("'", '"')


@pytest.mark.parametrize("page", pages())
def test_commands_exist(page):
    text = pages()[page]
    for command in re.findall(r"python -m overflow_fast ([^`#\n]+)", text):
        if command.strip() != "--version":
            make_parser().parse_args(shlex.split(command))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert f"\n{target}:" in makefile, target


_spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tools/tables.py")
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


@pytest.mark.parametrize("page", pages())
def test_tables_are_what_the_code_has(page):
    text = pages()[page]
    assert tables.renewed(text) == text, "run python docs/tools/tables.py"


def test_every_table_is_on_a_page():
    names = [n for text in pages().values() for n in tables.names_in(text)]
    assert sorted(names) == sorted(tables.TABLES)


def test_the_stub_of_public_names_is_what_the_table_of_them_has():
    assert tables.stub() == tables.STUB.read_text(), "run python docs/tools/tables.py"
