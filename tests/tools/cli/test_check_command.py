"""The exit status and the output of `check`."""

import json

import pytest
import torch

from overflow_fast.__main__ import main

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(2)}, "good.pt")
    torch.save({"w": torch.tensor([NAN, 1.0]), "mask": torch.tensor([-INF])}, "bad.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    return tmp_path


STATUS = {
    "good.pt": 0,
    "bad.pt": 1,
    "good.pt bad.pt text.pt": 1,
    "good.pt text.pt": 2,
    "bad.pt --allow *:weight*=nan,-inf": 0,
    "bad.pt --allow *:buffer.mask=-inf": 1,
    "bad.pt --allow mask": 2,
    "bad.pt --allow mask=-inf": 2,
    "none.pt": 2,
    "good.pt none.pt": 2,
    "none.pt bad.pt": 1,
    "bad.pt --allow *:*=nan --allow *:*=-inf": 0,
}


@pytest.mark.day
@pytest.mark.parametrize("typed", STATUS)
def test_the_status_says_what_was_found(typed, folder, capsys, as_kept):
    assert main(["check", *typed.split()]) == STATUS[typed]
    as_kept(capsys.readouterr())


def test_json_is_a_line_for_each_path(folder, capsys):
    assert main(["check", "good.pt", "none.pt", "bad.pt", "--json"]) == 1
    good, none, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (none["is_finite"], none["num_tensors"]) == (None, 0)
    assert (good["path"], good["is_finite"], good["bad"]) == ("good.pt", True, [])
    assert [each["name"] for each in bad["bad"]] == ["w", "mask"]
    assert (bad["bad"][0]["num_nan"], bad["is_finite"]) == (1, False)
