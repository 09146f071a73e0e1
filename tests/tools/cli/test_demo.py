"""The demo ends with the cause, the remedy and a page."""

import pytest

from overflow_fast.__main__ import main


@pytest.mark.slow
def test_the_demo_ends_with_cause_remedy_and_page(tmp_path, capsys, as_kept):
    page = tmp_path / "demo.html"
    assert main(["demo", "--page", str(page)]) == 0
    out = capsys.readouterr().out
    said = out.partition("The page of this run: ")[0].rstrip().splitlines()
    assert any("at demo.py:" in e and "overflowed float16" in e for e in said)
    tried = [each for each in said if each.startswith("tried     ")]
    assert "float32: finite, loss" in tried[0]
    assert "    overflow_fast.keep_in_fp32(model, [" in "\n".join(said)
    as_kept([line for line in out.splitlines() if str(page) in line])
    assert "keep_in_fp32(model" in page.read_text()
    assert main(["demo", "--page", str(tmp_path)]) == 2
