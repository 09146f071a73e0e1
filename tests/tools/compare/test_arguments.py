"""Arguments that cannot be used, which are refused before anything runs."""

import pytest
from compared_models import batch, tower

import overflow_fast


def test_a_recording_needs_a_model_and_a_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for folder, model, kind, message in (
        (tmp_path / "x", None, TypeError, "model must be"),
        (None, tower(), TypeError, "folder must be"),
        (file, tower(), OSError, "folder must be"),
        (file / "x", tower(), OSError, "folder cannot be made"),
    ):
        with pytest.raises(kind, match=message):
            overflow_fast.recording(folder, model)
    assert list(tmp_path.iterdir()) == [file] and file.read_text() == "mine"


def test_models_side_by_side_must_be_modules(as_kept):
    as_kept.error(TypeError, overflow_fast.compare_live, tower(), None, batch())


def test_what_a_comparison_cannot_use_is_refused(tmp_path, as_kept):
    def call(options):
        overflow_fast.compare(tmp_path, tmp_path, **options)

    as_kept.errors(
        call,
        [
            {"names": ["a"]},
            {"names": {"(": "x"}},
            {"names": {"a": r"\1"}},
            {"names": {"a": r"\g<b>"}},
        ],
    )


def test_a_schema_that_is_no_number_is_an_error(tmp_path, as_kept):
    (tmp_path / "rank-0.step-0.jsonl").write_text(
        '{"kind": "recording", "schema": "x"}\n'
    )
    with pytest.raises(overflow_fast.RecordingError) as raised:
        overflow_fast.compare(tmp_path, tmp_path)
    as_kept(raised.value)


def test_recordings_without_a_forward_say_so(tmp_path, as_kept):
    with overflow_fast.recording(tmp_path, tower()):
        pass
    as_kept(overflow_fast.compare(tmp_path, tmp_path).said)
