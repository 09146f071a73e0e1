"""Wrong arguments of the guard, what it looks at, and when."""

import itertools

import pytest
import torch
from guarding import INF, NAN, batches, hooks_of, make, plant, train, train_step, warned
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.overhead import OverheadTimer
from overflow_fast.guard.report.cost import Cost
from overflow_fast.guard.watching import unjudged_frames
from overflow_fast.monitors import Headroom, Underflow
from overflow_fast.options import Schedule


def test_wrong_arguments_are_told(model, optimizer, as_kept):
    def call(arguments):
        OverflowGuard(model, optimizer, **arguments)

    as_kept.errors(
        call,
        [
            {"on_overflow": "stop"},
            {"on_overflow": None},
            {"watch": "weights"},
            {"watch": []},
            {"watch": ["grads"]},
            {"watch": ["tripwir"]},
            {"watch": ["grad_outputs"]},
            {"include": "head"},
            {"include": ["tail"]},
            {"exclude": None},
            {"exclude": ["x.*"]},
            {"sync": "never"},
            {"max_consecutive_skips": -1},
            {"process_group": True},
        ],
    )
    assert hooks_of(model, optimizer) == 0


def test_wrong_models_are_told(as_kept):
    def call(model):
        OverflowGuard(model)

    as_kept.errors(call, [None, [nn.ReLU(), 3], [], {}])


@pytest.mark.parametrize("optimizer", [3, "adam", [None], nn.ReLU()])
def test_wrong_optimizers_are_told(optimizer, as_kept):
    as_kept.error(TypeError, OverflowGuard, nn.ReLU(), optimizer)


def test_a_wrong_record_is_told(model, optimizer, as_kept):
    with OverflowGuard(model, optimizer) as guard:
        as_kept.error(TypeError, guard.record, loss=1.0)


# What is looked at.


def test_modules_are_chosen_by_patterns():
    def first_of(**chosen):
        model, optimizer = make()
        with plant(model.blocks[1].act, NAN):
            report = warned(
                model, optimizer, batches(1)[0], watch=("activations",), **chosen
            )
        return report and report.verdict.first.fqn

    assert first_of(include=["head"]) == "head"
    assert first_of(include=["blocks.0*"]) is None
    assert first_of(exclude=["blocks.1.act", "*fc2"]) == "blocks.1"
    model, optimizer = make()
    guard = OverflowGuard(model, optimizer, include=["blocks.*"], exclude=["*.act"])
    coverage = guard.coverage()
    assert (coverage.modules_watched, coverage.modules) == (9, 16)
    hooked = [name for name, m in model.named_modules() if m._forward_hooks]
    assert hooked == [
        "",  # where a forward begins and ends
        *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".fc1", ".fc2")),
    ]
    guard.remove()


def test_weights_and_gradients_follow_the_patterns(model, optimizer):
    model.head.weight.data[0, 0] = INF
    watch = ("weights", "gradients")
    batch = batches(1)[0]
    assert not warned(model, optimizer, batch, watch=["weights"], exclude=["head"])
    assert warned(model, optimizer, batch, watch=watch, include=["head"])


@pytest.mark.parametrize(
    "watch, hooks",
    [
        (("gradients",), 1),  # the root, whose buffers are restored
        (("gradients", "loss"), 1),
        (("weights", "gradients", "loss"), 9),  # the root, and who has weights
        (("activations",), 16),
    ],
)
def test_only_what_is_needed_has_hooks(model, optimizer, watch, hooks):
    with OverflowGuard(model, optimizer, watch=watch):
        hooked = [m for m in model.modules() if m._forward_hooks]
    assert len(hooked) == hooks


def test_the_loss_alone_is_seen(model, optimizer):
    with plant(model.head, NAN):
        verdict = warned(
            model, optimizer, batches(1)[0], watch=("loss", "gradients")
        ).verdict
    assert (verdict.first.kind, verdict.first.label) == ("recorded", "loss")


def test_weights_alone_are_scanned_once_each(model, optimizer):
    model.unused = torch.nn.Linear(2, 2)
    with OverflowGuard(model, optimizer, watch=("weights",)) as guard:
        x, y = batches(1)[0]
        for _ in range(3):
            model(x, y=y)["loss"].backward()
        optimizer.step()
        coverage = guard.coverage()
    sizes = [p.nbytes for p in model.parameters()]
    assert coverage.tensors_scanned == len(sizes)
    assert coverage.bytes_scanned == sum(sizes)


def test_what_was_not_asked_for_is_said(model, optimizer):
    with OverflowGuard(model, optimizer, watch=("gradients",)) as guard:
        train(model, optimizer, batches(1))
    assert guard.coverage().not_watched == [
        *("activations", "grad_outputs", "weights", "buffers", "loss"),
        "optimizer_state",
    ]


# When it is looked at.


def watched(schedule, count=12):
    return [int(not schedule.left_out_by(step)) for step in range(count)]


def test_steps_are_chosen():
    assert watched(Schedule(), 3) == [1, 1, 1]
    assert watched(Schedule(every=3), 7) == [1, 0, 0, 1, 0, 0, 1]
    assert watched(Schedule(every=2, warmup=3), 8) == [0, 0, 0, 1, 0, 1, 0, 1]


def test_between_watched_steps_no_module_has_a_hook(model, optimizer):
    seen = []
    with OverflowGuard(
        model, optimizer, "warn", schedule=Schedule(every=3, warmup=1)
    ) as guard:
        for batch in batches(8):
            seen.append(hooks_of(model) > 0)
            with plant(model.head, NAN):
                train_step(model, optimizer, batch)
            model.load_state_dict(make()[0].state_dict())
    assert seen == [False, True, False, False, True, False, False, True]
    assert (guard.coverage().steps, guard.coverage().steps_watched) == (8, 3)


def test_switching_off_leaves_no_hook(model, optimizer):
    x, y = batches(1)[0]
    guard = OverflowGuard(model, optimizer)
    assert guard.enabled
    with plant(model.head, NAN):
        loss = model(x, y=y)["loss"]
        guard.disable()
        assert not guard.enabled
        assert hooks_of(model, optimizer) == 1  # the plant's
        loss.backward()  # hooks in the graph are silent
        optimizer.step()
    assert guard.last_report is None
    guard.enable()
    with plant(model.head, NAN), pytest.raises(FloatingPointError):
        train_step(model, optimizer, (x, y))
    guard.remove()
    guard.remove()
    assert hooks_of(model, optimizer) == 0
    assert guard.check() is None


def test_what_backward_finds_while_the_guard_is_off_is_not_judged(model, optimizer):
    x, y = batches(1)[0]
    with OverflowGuard(
        model, optimizer, watch=("activations", "grad_outputs")
    ) as guard:
        with plant(model.head, NAN, backward=True):
            loss = model(x, y=y)["loss"]
            guard.disable()
            loss.backward()
            guard.enable()
        assert guard.check() is None


@pytest.mark.parametrize("is_toggled", [False, True])
def test_buffers_are_put_back_whatever_the_first_step_was(model, optimizer, is_toggled):
    data = batches(3)
    with OverflowGuard(model, optimizer, "skip") as guard:
        if is_toggled:
            guard.disable()
            guard.enable()
        else:
            with plant(model.blocks[0], INF):
                train_step(model, optimizer, data[0])
        train(model, optimizer, data[1:2])
        before = model.norm.running_mean.clone()
        with plant(model.blocks[0], INF):
            train_step(model, optimizer, data[2])
        assert guard.last_step_skipped
    assert before.equal(model.norm.running_mean)


def test_buffers_that_moved_while_the_guard_was_off_are_kept(model, optimizer):
    data = batches(4)
    with OverflowGuard(model, optimizer, "skip") as guard:
        train(model, optimizer, data[:2])
        guard.disable()
        train(model, optimizer, data[2:3])
        before = model.norm.running_mean.clone()
        guard.enable()
        with plant(model.blocks[0], INF):
            train_step(model, optimizer, data[3])
    assert guard.num_skipped == 1
    assert before.equal(model.norm.running_mean)


def test_a_cost_is_measured(model, optimizer):
    with OverflowGuard(model, optimizer) as guard:
        train(model, optimizer, batches(3))
        cost = guard.cost
    assert 0 < cost.guard_seconds < cost.step_seconds
    assert 0 < cost.share < 1


def test_each_step_costs_what_it_took_itself(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(OverheadTimer, "_now", lambda self: next(ticks))
    timer, costs = OverheadTimer([]), []
    for _ in range(2):
        with timer:
            pass
        timer.end_step(is_watched=True)
        costs.append(timer.cost)
    assert costs == [Cost(3, 1, 1 / 3)] * 2


def test_an_optimizer_of_another_model_is_told_of(model, optimizer, caplog, as_kept):
    other, strangers = make(width=4)
    OverflowGuard(model, optimizer).remove()
    OverflowGuard([model, other], [optimizer, strangers]).remove()
    assert not caplog.records
    OverflowGuard(model, strangers).remove()
    as_kept(caplog.messages)


def test_a_guard_that_never_judges_says_so(caplog, as_kept):
    model, optimizer = make()
    with OverflowGuard(model) as guard:
        for batch in batches(4):
            train_step(model, optimizer, batch)
        guard.check()
        for batch in batches(4):
            train_step(model, optimizer, batch)
        assert not caplog.records
        for batch in batches(4):
            train_step(model, optimizer, batch)
    (record,) = caplog.records
    as_kept(record.getMessage())


def leave_out(model, optimizer, scales):
    """A loop that makes no step where a gradient is bad, as own loss scalers do."""
    for (x, y), scale in zip(batches(len(scales)), scales, strict=True):
        loss = model(x, y=y)["loss"]
        optimizer.zero_grad()
        (scale * loss).backward()
        gradients = [p.grad for p in model.parameters()]
        if all(bool(each.isfinite().all()) for each in gradients):
            optimizer.step()


def test_steps_that_the_program_leaves_out_are_told_where_they_are_many(
    caplog, monkeypatch, as_kept
):
    monkeypatch.setattr(unjudged_frames, "MANY_LEFT_OUT", 6)
    model, optimizer = make()
    with OverflowGuard(model, optimizer) as guard:
        leave_out(model, optimizer, [1.0, 1.0, INF, INF, INF, INF, 1.0])
        assert not caplog.records
        leave_out(model, optimizer, [1.0] * 2 + [INF] * 20)
        (record,) = caplog.records
        as_kept(record.getMessage())
        with pytest.raises(NonFiniteError, match="grad_output"):
            guard.check()


@pytest.mark.parametrize("bad", [0, 1])
def test_gradients_of_many_forwards_are_added_up_without_a_word(
    caplog, monkeypatch, bad
):
    monkeypatch.setattr(unjudged_frames, "MANY_LEFT_OUT", 6)
    model, optimizer = make()
    with OverflowGuard(model, optimizer, on_overflow="skip"):
        for i, (x, y) in enumerate(batches(20)):
            (model(x, y=y)["loss"] * (INF if i < bad else 1.0)).backward()
        assert not caplog.records
        optimizer.step()


@pytest.mark.parametrize("kind", ["StepLR", "ReduceLROnPlateau"])
def test_a_scheduler_is_refused_as_an_optimizer(model, optimizer, kind, as_kept):
    arguments = (1,) if kind == "StepLR" else ()
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, *arguments)
    as_kept.error(TypeError, OverflowGuard, model, scheduler)
    with pytest.raises(TypeError, match=f"the scheduler {kind}"):
        OverflowGuard(model, [optimizer, scheduler])
    assert hooks_of(model, optimizer) == 0


def test_arguments_that_can_do_nothing_are_logged(tmp_path, caplog, as_kept):
    file = tmp_path / "file"
    file.write_text("")
    model, optimizer = make()

    def said(**arguments):
        caplog.clear()
        OverflowGuard(model, optimizer, **arguments).remove()
        return "\n".join(record.getMessage() for record in caplog.records)

    assert "leave no module" in said(exclude=["*"])
    as_kept(said(log=file / "log"))
    as_kept(said(record=file / "record"))
    as_kept(said(evidence=file))


@pytest.mark.parametrize("name", ["log", "record", "evidence"])
@pytest.mark.parametrize(
    "where", ["file/x", "", "file", "n" * 300, "a\0b", "/proc/no/x"]
)
def test_a_path_that_cannot_be_used_ends_nothing(where, name, tmp_path, caplog):
    (tmp_path / "file").write_text("something else")
    model, optimizer = make()
    path = where if where.startswith(("a", "/")) else tmp_path / where
    options = {"explain": False, "on_overflow": "skip", name: path}
    with OverflowGuard(model, optimizer, **options):
        for scale in (1, NAN, 1, NAN):
            model(torch.ones(4, 8) * scale, y=torch.ones(4, 1))["loss"].backward()
            optimizer.step()
    usual = ("The optimizer step was skipped", "steps watched")
    said = [each for each in caplog.messages if not any(u in each for u in usual)]
    if (name, where) == ("evidence", ""):  # that is a folder
        assert not said
    else:  # at once, and where something is lost
        assert 1 <= len(said) <= 2


def test_arguments_that_do_something_are_not_logged(model, optimizer, tmp_path, caplog):
    for folder in (tmp_path, tmp_path / "new" / "folder"):
        arguments = {"log": folder / "log", "record": folder / "record"}
        monitors = [Headroom(), Underflow()]
        evidence = folder / "evidence"
        OverflowGuard(
            model, optimizer, evidence=evidence, monitors=monitors, **arguments
        ).remove()
    assert caplog.records == []
    assert not (tmp_path / "new").exists()
