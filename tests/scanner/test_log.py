"""Each line that is logged begins with the package's name."""

import io
import logging
import warnings

import pytest

import overflow_fast  # noqa: F401

log = logging.getLogger("overflow_fast")


@pytest.fixture
def written():
    """What a user's own handler and format write."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)
    yield out
    log.removeHandler(handler)


def test_each_line_of_a_record_begins_with_the_name(written, as_kept):
    log.warning("Step %d\nis bad:\n\n%s", 3, "two\nlines")
    as_kept(written.getvalue().splitlines())


def test_each_line_of_a_traceback_does_too(written, caplog, as_kept):
    try:
        raise KeyError("the cause")
    except KeyError:
        log.warning("failed", exc_info=True)
    lines = written.getvalue().splitlines()
    assert lines[0] == "WARNING [overflow_fast] failed"
    as_kept(lines[-1])
    assert all(line.startswith("[overflow_fast] ") for line in lines[1:])
    assert isinstance(caplog.records[0].exc_info[1], KeyError)  # for other handlers


def test_it_is_written_once_however_many_handlers_there_are(written, caplog):
    log.warning("100%")
    assert caplog.messages == ["[overflow_fast] 100%"]
    assert written.getvalue() == "WARNING [overflow_fast] 100%\n"


def test_arguments_that_do_not_fit_are_left_to_logging(caplog, capsys):
    log.warning("%d steps", "no number")  # pytest's handler raises
    assert "TypeError: %d format: a real number is required" in capsys.readouterr().err


def test_other_loggers_are_left_alone(caplog):
    logging.getLogger("overflow_fast.mine").warning("x")
    logging.getLogger().warning("y")
    assert caplog.messages == ["x", "y"]


def test_that_it_is_disabled_is_warned_of_once(written, monkeypatch, as_kept):
    monkeypatch.setattr(log, "disabled", True)  # as `logging.config.dictConfig()` does
    monkeypatch.setattr(log, "_is_told", False)
    with pytest.warns(UserWarning) as warned:
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            log.log(level, "x")
    (only,) = warned
    as_kept(only.message)
    assert only.filename == __file__
    assert written.getvalue() == ""


def test_a_warning_that_is_an_error_does_not_leave_it(monkeypatch):
    monkeypatch.setattr(log, "disabled", True)
    monkeypatch.setattr(log, "_is_told", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.warning("x")
