"""The demo: both reports, compared, and an exit status that can be trusted."""

import pytest

import overflow_fast.tools.demo as demo
from overflow_fast.__main__ import main
from overflow_fast.tools.demo import (
    DemoSettings,
    DetectorOutput,
    build,
    forward,
    push_to_the_limit,
    read_batch,
    show,
)

pytestmark = pytest.mark.slow

TINY = DemoSettings(batch_size=2, length=32, rounds=1, tiny=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_finds_the_overflow_and_agrees(capsys, dtype, as_kept):
    assert show(TINY._replace(dtype=dtype)) == 0
    out = capsys.readouterr().out
    report, _, table = out.partition("printed and raised the same, byte for byte")
    assert "output has infs" in report
    assert "encoder.block.1.layer.1.dropout Dropout" in report
    assert table.count("ms") == 3
    assert out.index("Timing clean") < out.index("Without detection") < len(report)
    as_kept([each for each in table.splitlines() if "keep_in_fp32" in each])


def test_a_remedy_that_does_not_help_is_a_failure(monkeypatch, capsys, as_kept):
    monkeypatch.setattr(demo, "keep_in_fp32", lambda model, names: None)
    assert show(TINY) == 1
    as_kept([e for e in capsys.readouterr().out.splitlines() if "overflows" in e])


@pytest.mark.parametrize("lie", ["report", "error"])
def test_reports_that_differ_are_a_failure(monkeypatch, capsys, lie, as_kept):
    true_story = demo._overflow

    def story(detector, settings, batch):
        found = true_story(detector, settings, batch)
        if detector is not demo.DebugUnderflowOverflow:
            return found
        return found._replace(**{lie: getattr(found, lie).replace("inf", "1nf")})

    monkeypatch.setattr(demo, "_overflow", story)
    assert show(TINY) == 1
    before, found, _ = capsys.readouterr().out.partition("\n--- transformers")
    assert found
    as_kept(before.splitlines()[-1])


def test_no_overflow_is_a_failure(monkeypatch, capsys, as_kept):
    monkeypatch.setattr(demo, "_overflow", lambda *args: DetectorOutput("", None))
    assert show(TINY) == 1
    as_kept([e for e in capsys.readouterr().out.splitlines() if "detector f" in e])


def test_the_same_seed_gives_the_same_overflow():
    batch = read_batch(TINY)
    models = [build(TINY), build(TINY)]
    layers = [push_to_the_limit(model, batch, TINY) for model in models]
    assert layers[0] == layers[1]
    losses = [forward(model, batch, TINY.seed) for model in models]
    assert losses[0] == losses[1]


def test_the_text_is_read_in_many_scripts():
    batch = read_batch(TINY._replace(batch_size=16, length=64))
    assert batch["input_ids"].shape == (16, 64)
    assert batch["input_ids"].unique(dim=0).shape[0] == 16


def test_the_training_run_ends_with_cause_remedy_and_page(tmp_path, capsys, as_kept):
    arguments = ["--tiny", "--batch-size", "2", "--length", "32", "--rounds", "1"]
    page = tmp_path / "demo.html"
    assert main(["demo", *arguments, "--page", str(page)]) == 0
    out = capsys.readouterr().out
    said = out.partition("The page of this run: ")[0].rstrip().splitlines()
    assert any("overflowed float16" in each for each in said)
    tried = [each for each in said if each.startswith("tried     ")]
    assert "float32: finite, loss" in tried[0]
    assert "    overflow_fast.keep_in_fp32(model, [" in "\n".join(said)
    as_kept([line for line in out.splitlines() if str(page) in line])
    assert "keep_in_fp32(model" in page.read_text()
    assert main(["demo", "--page", str(tmp_path)]) == 2
