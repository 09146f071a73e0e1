"""What notebooks and TensorBoard show: pictures of records, reports as HTML."""

import base64
import io
import math
import re

import pytest
import torch
from flight_records import head_lines, step_line
from guarding import INF, batches, make, plant, train_step

from overflow_fast import OverflowGuard, read_record
from overflow_fast.guard.files.json_text import line_bytes
from overflow_fast.tools.record.heatmap import heatmap_pixels, png_of

NAN = math.nan


def colours(pixels):
    return [tuple(column.tolist()) for column in pixels[:, 0].T]


def test_a_pixel_has_the_colour_of_the_page():
    bits = torch.tensor([[0.0, -INF, NAN, 1.0, 4.0, 32.0, 99.0, INF, 0.5]]).double().T
    assert colours(heatmap_pixels(bits, 100)) == [
        (178, 24, 43),
        (0, 0, 0),
        (153, 153, 153),
        (239, 138, 98),
        (247, 247, 247),
        *[(33, 102, 172)] * 3,
        (208, 81, 70),
    ]


def test_steps_that_share_a_column_show_the_least():
    bits = torch.tensor([[4.0, NAN, 1.0, 4.0, -INF, NAN, NAN]]).double().T
    assert colours(heatmap_pixels(bits, 4)) == [
        (247, 247, 247),
        (239, 138, 98),
        (0, 0, 0),
        (153, 153, 153),
    ]


def test_the_png_is_the_picture():
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(0, 256, (3, 3, 5), dtype=torch.uint8)
    with image.open(io.BytesIO(png_of(pixels, scale=2))) as read:
        assert read.size == (10, 6) and read.mode == "RGB"
        raw = torch.frombuffer(bytearray(read.tobytes()), dtype=torch.uint8)
    large = pixels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert raw.view(6, 10, 3).permute(2, 0, 1).equal(large)


def write_record(path, steps):
    lines = [step_line(i, low=[1.0] * 4, high=[4.0] * 4) for i in range(steps)]
    path.write_bytes(head_lines() + b"".join(map(line_bytes, lines)) if steps else b"")
    return read_record(path)


def test_a_record_is_a_picture_in_a_notebook(tmp_path, as_kept):
    record = write_record(tmp_path / "run.ofr", 7)
    assert record.to_image().shape == (3, 4, 7)
    data = re.search(r"base64,([^\"]+)", record._repr_html_())[1]
    assert base64.b64decode(data).startswith(b"\x89PNG")
    as_kept(record._repr_html_())
    as_kept(write_record(tmp_path / "no.ofr", 0)._repr_html_())


def test_tensorboard_takes_the_picture(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    record = write_record(tmp_path / "run.ofr", 7)
    with SummaryWriter(tmp_path / "logs") as writer:
        writer.add_image("headroom", record.to_image(), 7)
    (image,) = EventAccumulator(str(tmp_path / "logs")).Reload().Images("headroom")
    assert (image.width, image.height, image.step) == (7, 4, 7)


def test_reports_and_headroom_are_escaped_html():
    model, optimizer = make()
    model.add_module("<script>", model.head)
    with OverflowGuard({"<b>": model}, optimizer, "warn") as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        table = guard.headroom()._repr_html_()
    report = guard.last_report._repr_html_()
    assert "<strong>Step 0: " in report and "<summary>" in report
    assert "<th>float16 bits</th>" in table and "would fit float16" in table
    for html in (report, table):
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
