"""The workflows name targets, files and releases of torch that there are."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))


def commands(workflow):
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_run_is_there(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for command in commands(path):
        for target in re.findall(r"\bmake ([\w-]+)", command):
            assert target in targets, target
        for name in re.findall(r"(?<![\w/])((?:tests|tools|\.ci)/[\w./-]+)", command):
            assert (ROOT / name).exists(), name


def test_workflows_are_for_the_same_releases_of_torch():
    lists = {
        tuple(job["strategy"]["matrix"]["torch"])
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        if "torch" in job.get("strategy", {}).get("matrix", {})
    }
    assert len(lists) == 1
    tried = (ROOT / "docs/works-with.md").read_text()
    for version in lists.pop():
        assert re.search(rf"^\| {re.escape(version)}\b", tried, re.M), version


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
