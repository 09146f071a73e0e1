"""What notebooks show: reports as HTML, the rest as lines of text."""

import pytest
import torch
from flight_records import head_lines, step_line
from guarding import INF, batches, make, plant, train_step

from overflow_fast import OverflowGuard, read_record
from overflow_fast.guard.files.json_text import line_bytes


def test_a_report_is_escaped_html_and_headroom_a_table():
    model, optimizer = make()
    model.add_module("<script>", model.head)
    with OverflowGuard({"<b>": model}, optimizer, "warn") as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        assert repr(guard.headroom()) == str(guard.headroom())
    html = guard.last_report._repr_html_()
    assert "<strong>Step 0: " in html and "<summary>" in html
    assert "&lt;b&gt;" in html and "<b>" not in html and "<script>" not in html


@pytest.mark.explains
def test_a_report_in_a_notebook_has_aligned_rows_and_code_as_code(as_kept):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4)
    with OverflowGuard(model, optimizer, "warn") as guard:
        loss = guard.run(lambda: -(1e4 * model(x)).softmax(1).log().mean())
        loss.backward()
        optimizer.step()
    shown, _, folded = guard.last_report._repr_html_().partition("<details>")
    assert "color" not in shown  # a theme's own are, light or dark
    assert "evidence  " in folded
    as_kept(shown.replace("><", ">\n<"))


def test_a_record_that_is_printed_says_what_it_has(tmp_path, as_kept):
    path = tmp_path / "run.ofr"
    lines = [step_line(i, high=[1.0] * 4) for i in range(3)]
    path.write_bytes(head_lines(models=["Net"]) + b"".join(map(line_bytes, lines)))
    as_kept(read_record(path))


def test_a_guard_and_its_coverage_are_lines_of_text():
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, "skip")
    names = f"{type(model).__name__}, {type(optimizer).__name__}"
    assert repr(guard) == f"OverflowGuard({names}): on, 0 steps, 0 bad"
    with plant(model.head, INF):
        train_step(model, optimizer, batches(1)[0])
    assert repr(guard) == f"OverflowGuard({names}): on, 1 step, 1 bad, 1 skipped"
    guard.remove()
    assert repr(guard).startswith(f"OverflowGuard({names}): off, 1 step")
    assert repr(guard.coverage()) == str(guard.coverage())
    del model, optimizer
    assert "OverflowGuard(" in repr(guard)
