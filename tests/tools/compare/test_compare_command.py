"""The command `compare`."""

import json

import pytest
from compared_models import batch, tower

import overflow_fast
from overflow_fast.tools.cli.command_line import main


@pytest.fixture
def folders(tmp_path):
    models = {"run": tower(), "same": tower(), "other": tower()}
    models["other"].blocks[1].norm.eps = 0.1
    for name, model in models.items():
        with overflow_fast.recording(tmp_path / name, model):
            model(batch())
    return {name: str(tmp_path / name) for name in models}


def test_it_returns_0_for_equal_runs(folders, capsys, as_kept):
    assert main(["compare", folders["run"], folders["same"]]) == 0
    as_kept(capsys.readouterr().out.partition("verdict  ")[0])


def test_it_returns_1_and_names_the_layer(folders, capsys, tmp_path, as_kept):
    output = tmp_path / "diff.html"
    assert main(["compare", folders["run"], folders["other"], "-o", str(output)]) == 1
    as_kept(capsys.readouterr().out.partition("verdict  ")[0])
    assert "blocks.1.norm" in output.read_text()


def test_it_maps_names(folders, capsys):
    both = ["compare", folders["run"], folders["same"]]
    assert main([*both, "--map", r"^head$=tail", "--map", "^tail$=head"]) == 0
    assert "paired by order" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--map", "head"], ["-o", "diff.txt"], ["--map", "(=x"]]
)
def test_it_returns_2_for_what_cannot_be_used(folders, capsys, arguments, as_kept):
    assert main(["compare", folders["run"], folders["same"], *arguments]) == 2
    as_kept(capsys.readouterr().err)


def test_it_returns_2_where_there_is_no_recording(tmp_path, capsys):
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert "holds no recording" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["empty", "run"])
def test_it_returns_3_where_weights_alone_were_compared(
    folders, capsys, tmp_path, other, as_kept
):
    for name in ("empty", "empty_too"):
        with overflow_fast.recording(tmp_path / name, tower()):
            pass
    other = {"empty": str(tmp_path / "empty_too"), "run": folders["run"]}[other]
    assert main(["compare", str(tmp_path / "empty"), other]) == 3
    as_kept(" ".join(capsys.readouterr().out.split()).partition("verdict  ")[0])


def test_other_weights_without_a_forward_are_a_difference(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        with overflow_fast.recording(tmp_path / name, tower(seed)):
            pass
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def test_it_prints_json_for_machines(folders, capsys):
    assert main(["compare", folders["run"], folders["other"], "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["first"]["module"] == "blocks.1.norm" and found["differs"]
