"""A report reads line by line, and says what became of the step as it was."""

import logging
import re

import pytest
import torch
from assembled import Assembled
from guarding import INF, NAN, batches, make, plant, train, train_step
from torch import nn
from torch.amp.grad_scaler import GradScaler

from overflow_fast import NonFiniteError, OverflowGuard, assert_finite_state
from overflow_fast.base.text import wrapped
from overflow_fast.guard.report import wording
from overflow_fast.guard.report.coverage import GuardCoverage
from overflow_fast.guard.report.explanation import Explanation
from overflow_fast.guard.report.op import Op
from overflow_fast.guard.report.report import Report
from overflow_fast.guard.verdict.verdict import BadEntry, Origin, Verdict

MADE, SKIPPED, RAISED = (wording._OUTCOMES[a] for a in ("warn", "skip", "raise"))
CHECKED, EVALUATED = wording._MOMENTS["check"], wording._MOMENTS["evaluation"]
LATE = wording._MOMENTS["after"]
OUTCOMES = {MADE, SKIPPED, RAISED, CHECKED, EVALUATED, LATE}


def outcome(report):
    """The sentence behind the headline; it is the only one of its kind."""
    said = [each for each in report.sentences() if "step" in each and each in OUTCOMES]
    assert len(said) <= 1 and (not said or said == report.sentences()[1:2])
    return report.sentences()[1]


def step_under(policy, **arguments):
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, policy, **arguments)
    with plant(model.head, INF):
        try:
            train_step(model, optimizer, batches(1)[0])
            if arguments:
                model(*batches(1)[0])
        except NonFiniteError as error:
            assert error.report is guard.last_report
    guard.disable()
    return guard.last_report


@pytest.mark.parametrize(
    "policy, sentence",
    [
        *[("warn", MADE), ("skip", SKIPPED), ("raise", RAISED)],
        *[(lambda report: "skip", SKIPPED), (lambda report: "warn", MADE)],
    ],
)
def test_the_step_is_said_to_be_made_or_not(policy, sentence):
    assert outcome(step_under(policy)) == sentence


def test_too_many_skips_raise_before_the_step(model, optimizer):
    with OverflowGuard(model, optimizer, "skip", max_consecutive_skips=1) as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
            with pytest.raises(NonFiniteError):
                train_step(model, optimizer, batches(1)[0])
    assert outcome(guard.last_report) == RAISED


def test_a_callable_is_not_told_what_it_has_yet_to_decide():
    seen = []
    step_under(lambda report: seen.append(str(report)) or "skip")
    assert not [sentence for sentence in OUTCOMES if sentence in seen[0]]


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_check_skips_nothing_and_says_so(model, policy):
    with OverflowGuard(model, None, policy) as guard:
        with plant(model.head, INF):
            model(*batches(1)[0])
        assert outcome(guard.check()) == CHECKED


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_an_evaluation_is_no_step(model, optimizer, policy):
    with OverflowGuard(model, optimizer, policy) as guard:
        with plant(model.head, INF), torch.no_grad():
            model(*batches(1)[0])
    assert outcome(guard.last_report) == EVALUATED


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_scaler_is_named_that_skipped(model, optimizer, policy, as_kept):
    scaler = GradScaler("cpu", init_scale=2.0)
    with OverflowGuard(model, optimizer, policy) as guard:
        with plant(model.head, INF):
            loss = model(*batches(1)[0])["out"].sum()
        scaler.scale(loss).backward()
        next(model.parameters()).grad.fill_(INF)
        scaler.step(optimizer)
    assert guard.last_report.skipped_by == "GradScaler"
    as_kept(outcome(guard.last_report))


def test_late_stats_cannot_undo_the_step(model, optimizer, emulated):
    emulated.state.holds_events = True
    with OverflowGuard(model, optimizer, "warn", sync="lagged", _defer=True) as guard:
        with plant(model.head, INF):
            train_step(model, optimizer, batches(1)[0])
        train_step(model, optimizer, batches(1)[0])
    assert guard.last_report.step == 0
    assert outcome(guard.last_report) == LATE


def test_a_state_is_no_step(model):
    model.head.weight.data[0, 0] = NAN
    with pytest.raises(NonFiniteError) as raised:
        assert_finite_state(model)
    assert not OUTCOMES & set(raised.value.report.sentences())


# The layout.


def report_of(fqn, label="output", **arguments):
    first = BadEntry(
        *("output", fqn, "Linear", label),
        **{"dtype": "float16", "numel": 262144, "num_nan": 3, "num_inf": 8},
    )
    origin = Origin("made", maker=fqn)
    verdict = Verdict(first=first, origin=origin, num_bad_frames=1)
    return Report(12, "skip", verdict, moment="before", **arguments)


def test_what_comes_first_comes_first(as_kept):
    text = str(step_under("skip", monitors=(), explain=False))
    frames, _, answer = text.rpartition("\n\n")
    starts = ["Step 0: ", SKIPPED, "The inputs of head"]
    lines = answer.splitlines()
    places = [next(i for i, x in enumerate(lines) if x.startswith(s)) for s in starts]
    assert places == sorted(places) and places[:2] == [0, 1]
    as_kept(frames.splitlines()[0])


@pytest.mark.parametrize(
    "fqn", ["", "encoder.block.4.layer.1.dropout", "x." * 80 + "y"]
)
def test_no_line_is_long_but_for_a_long_name(fqn):
    code = "`" + "code of one piece " * 9 + "`"
    notes = ["This is a note with many words. " * 12, code]
    text = str(report_of(fqn, notes=notes, evidence="/a folder/" * 12, where="rank 2"))
    for line in text.splitlines():
        short = re.sub(r"`[^`]*`", "``", line.replace(fqn or "the model", ""))
        assert len(short) <= 100, line
    assert f"`{'/a folder/' * 12}`" in text and code in text
    assert not fqn or fqn in text


def test_wrapping_loses_nothing():
    assert wrapped("short") == ["short"]
    words = " ".join(f"word{i}" for i in range(60))
    assert " ".join(line.strip() for line in wrapped(words)) == words
    assert all(line.startswith("  word") for line in wrapped(words)[1:])


def test_each_logged_line_of_a_report_names_the_package(caplog):
    step_under("warn")
    (text,) = caplog.messages
    assert all(line.startswith("[overflow_fast]") for line in text.splitlines())
    assert "[overflow_fast]" not in str(step_under("warn"))
    with pytest.raises(NonFiniteError, match=r"^Step 0"):
        raise NonFiniteError(step_under("warn"))


def test_without_advice_there_is_no_line_for_it(monkeypatch):
    monkeypatch.setattr("overflow_fast.guard.report.wording.advice_for", lambda *_: "")
    assert "What to try" not in str(report_of("fc"))


# The line at the start, and the one at the end.


def run_lines(caplog):
    return [
        (record.levelname, record.getMessage().removeprefix("[overflow_fast] "))
        for record in caplog.records
        if "atching" in record.getMessage() or "steps watched" in record.getMessage()
    ]


def without_share(lines):
    share = r", [\d.]+% of their time in the guard"
    return [(level, re.sub(share, "", text)) for level, text in lines]


def test_a_clean_run_has_a_line_at_both_ends(model, optimizer, caplog, as_kept):
    caplog.set_level(logging.INFO, "overflow_fast")
    guard = OverflowGuard(model, optimizer, "skip")
    train(model, optimizer, batches(3))
    guard.remove()
    guard.remove()
    as_kept(run_lines(caplog))


def test_a_run_with_a_report_ends_with_a_warning(model, optimizer, caplog, as_kept):
    with OverflowGuard(model, optimizer, "skip", schedule=2):
        with plant(model.head, INF):
            train(model, optimizer, batches(2))
    as_kept(without_share(run_lines(caplog)))


def test_a_run_says_what_it_has_not_seen(caplog, as_kept):
    caplog.set_level(logging.INFO, "overflow_fast")
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    both = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (first, second)]
    with OverflowGuard(
        {"a": nn.Sequential(first, nn.ReLU()), "b": second},
        both,
        lambda report: "warn",
        exclude=["a.1"],
    ):
        second(first(torch.ones(2, 2))).sum().backward()
        for optimizer in both:
            optimizer.step()
    as_kept(without_share(run_lines(caplog)))


def test_each_gap_of_a_coverage_has_a_sentence(as_kept):
    scans = {"tensors_listed": 9, "tensors_scanned": 8, "bytes_scanned": 800}
    missed = {"not_scanned": {"meta tensor": 1}, "opaque": {"set": 1, "Box": 2}}
    steps = {"modules": 3, "modules_watched": 2, "steps": 5, "steps_watched": 4}
    rest = {"without_gradient": 1, "has_seen_loss": False, "failures": 1}
    known = {**scans, **missed, **steps, **rest, "ignores_spikes": True}
    state = GuardCoverage(
        **known, not_watched=["optimizer_state"], rules_unused=["out:output"]
    )
    few = GuardCoverage(**known, not_watched=["weights", "buffers"], rules_unused=[])
    as_kept(state, few, few.gaps())


def test_where_nothing_is_trained_nothing_is_said(caplog):
    caplog.set_level(logging.INFO, "overflow_fast")
    OverflowGuard(nn.Identity()).remove()
    assert not run_lines(caplog)


@pytest.mark.parametrize(
    ("cause", "op"),
    [
        ("undefined", Op("aten.log", code="p.log()")),
        ("not reproducible", Op("aten.empty", code="torch.empty(4)")),
        ("not reproducible", None),
        ("unknown", Op("aten.log", code="p.log()")),
    ],
)
@pytest.mark.explains
def test_no_origin_is_called_unknown_where_the_replay_names_it(cause, op):
    made_by = "code after the model"
    first = BadEntry("loss", "", "", "loss", dtype="float32", num_nan=1, numel=1)
    verdict = Verdict(first=first, origin=Origin("unclear", maker=made_by))
    found = Explanation("forward", cause, op=op)
    text = str(Report(0, "warn", verdict, explanation=found))
    assert (made_by in text) is (op is None or cause == "unknown")
    assert "of its" not in text  # a share of one value is none


class Exponential(Assembled):
    def forward(self, x):
        return self.fc(x).exp().log()


@pytest.mark.parametrize("explain", [False, True])
@pytest.mark.explains
def test_where_a_replay_answers_nothing_else_does(explain, as_kept):
    model = nn.Sequential(Exponential(fc=nn.Linear(4, 4)), nn.Linear(4, 1)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[0].fc.bias.fill_(20)
    with OverflowGuard(model, optimizer, "warn", explain=explain) as guard:
        model(torch.ones(2, 4).half()).float().mean().backward()
        optimizer.step()
    as_kept(guard.last_report.sentences())
    cures = [] if not explain else guard.last_report.explanation.remedies
    assert any(each.is_recommended for each in cures) is explain
    assert (guard.last_report.explanation is not None) is explain


class Divided(Assembled):
    """Gives a module what it made non-finite itself, with a mask of that module's."""

    def forward(self, x):
        mask = torch.tensor([0.0, -INF, 0.0, 0.0])
        return self.attention((self.fc(x) * 0).log() * 0, mask)


class Masked(nn.Module):
    def forward(self, x, mask):
        return (x + mask).softmax(-1)


@pytest.mark.explains
def test_a_mask_is_not_said_to_be_given_to_another_module():
    model = Divided(fc=nn.Linear(4, 4), attention=Masked())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=True) as guard:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    report = guard.last_report
    assert report.explanation.names_maker
    assert report.verdict.first.fqn == "attention" and report.verdict.masks
    assert "Given to" not in str(report)


class WithPosition(Assembled):
    """Uses a weight of its own in its own code, which might write to it."""

    def forward(self, x):
        return self.fc(x) + self.position


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("explain", [True, False])
@pytest.mark.explains
def test_a_weight_is_not_both_known_and_not_known_to_be_bad_before(
    is_trained, explain, as_kept
):
    model = WithPosition(fc=nn.Linear(4, 4), position=nn.Parameter(torch.zeros(4)))
    model.position.requires_grad_(is_trained).data.fill_(NAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OverflowGuard(model, optimizer, "warn", explain=explain) as guard:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    as_kept(guard.last_report.sentences(), guard.last_report.explanation)
