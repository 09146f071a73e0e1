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


@pytest.mark.parametrize("kind", ["json", "xlsx", "html"])
@pytest.mark.parametrize("text", ["mine\n", '{"kind": "comparison"}', "[]", ""])
def test_a_file_of_the_user_is_not_written_over(
    folders, tmp_path, capsys, kind, text, as_kept
):
    file = tmp_path / f"u.{kind}"
    file.write_text(text)
    if kind == "xlsx":
        pytest.importorskip("xlsxwriter")
    assert main(["compare", *folders, "-o", str(file)]) == 2
    as_kept(capsys.readouterr().err)
    assert file.read_text() == text


def test_no_text_of_a_workbook_is_a_formula(folders, tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    diff = overflow_fast.compare(*folders)
    diff.rows[0].notes.append("=1+1")
    diff.rows[0].highlight = "=1+1"
    book = openpyxl.load_workbook(diff.to_xlsx(tmp_path / "u.xlsx"))
    cells = [cell for row in book.active.iter_rows() for cell in row]
    assert "f" not in {cell.data_type for cell in cells}
    assert "=1+1" in {cell.value for cell in cells}


def test_an_older_page_is_written_over(folders, tmp_path):
    for _ in range(2):
        assert main(["compare", *folders, "-o", str(tmp_path / "u.html")]) == 0
