"""The workflows name targets, files and releases of torch that there are."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))


def commands(workflow):
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_run_is_there(path):
    targets = re.findall(r"^([\w-]+):", MAKEFILE, re.M)
    for command in commands(path):
        for target in re.findall(r"\bmake ([\w-]+)", command):
            assert target in targets, target
        for name in re.findall(r"(?<![\w/])((?:tests|tools|\.ci)/[\w./-]+)", command):
            assert (ROOT / name).exists(), name


def made_by_make(name):
    """The words of a variable of the Makefile."""
    return tuple(re.search(rf"^{name} \?= (.+)", MAKEFILE, re.M)[1].split())


def test_workflows_and_make_are_for_the_same_releases_of_torch():
    lists = {
        tuple(job["strategy"]["matrix"]["torch"])
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        if "torch" in job.get("strategy", {}).get("matrix", {})
    }
    assert lists == {made_by_make("TORCHES")}
    tried = (ROOT / "docs/works-with.md").read_text()
    for version in lists.pop():
        assert re.search(rf"^\| {re.escape(version)}\b", tried, re.M), version


def test_wheels_are_tried_where_all_is_that_the_package_needs():
    """They are installed without what they depend on: torch must stay as it is."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    path = FOLDER / "workflows/wheels.yml"
    jobs = yaml.safe_load(path.read_text())["jobs"]
    installed = [step.get("run", "") for step in jobs["try"]["steps"]]
    _, _, recipe = MAKEFILE.partition("$(WHEELS)/torch-%/built")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for each in needed["dependencies"]:
        name = re.match(r"[\w-]+", each)[0]
        if "python_version" not in each:  # wheels are tried with newer ones
            assert re.search(rf"pip install .*\b{name}\b", "\n".join(installed)), name
            assert re.search(rf"pip install [^&]*\b{name}\b", recipe), name


@pytest.mark.parametrize("name", ["bug", "idea"])
def test_issue_forms_have_what_github_asks_for(name):
    form = yaml.safe_load((FOLDER / f"ISSUE_TEMPLATE/{name}.yml").read_text())
    assert form["name"] and form["description"]
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_is_of_this_release():
    import overflow_fast

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == overflow_fast.__version__
    dated = f"## {overflow_fast.__version__} ({citation['date-released']})"
    assert dated in (ROOT / "CHANGELOG.md").read_text()
