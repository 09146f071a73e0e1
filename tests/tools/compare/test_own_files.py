"""What a comparison may be written over."""

import pytest
from compared_models import batch, tower

import overflow_fast
from overflow_fast.tools.cli.command_line import main


@pytest.fixture
def folders(tmp_path):
    for name in ("a", "b"):
        model = tower()
        with overflow_fast.recording(tmp_path / name, model):
            model(batch())
    return [str(tmp_path / name) for name in ("a", "b")]


@pytest.mark.parametrize("text", ["mine\n", '{"kind": "comparison"}', "[]", ""])
def test_a_file_of_the_user_is_not_written_over(
    folders, tmp_path, capsys, text, as_kept
):
    file = tmp_path / "u.html"
    file.write_text(text)
    assert main(["compare", *folders, "-o", str(file)]) == 2
    as_kept(capsys.readouterr().err)
    assert file.read_text() == text


def test_an_older_page_is_written_over(folders, tmp_path):
    for _ in range(2):
        assert main(["compare", *folders, "-o", str(tmp_path / "u.html")]) == 0
