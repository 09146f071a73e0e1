"""Forwards without autograd: whose request is bad, and why."""

import contextlib
import functools
import itertools
import logging
import re
import sys
import threading
import time
import weakref

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.explainer import replayer
from overflow_fast.guard.requests import again, forwards
from overflow_fast.guard.requests.left_state import LeftState
from overflow_fast.guard.requests.requests import Requests
from overflow_fast.guard.watching import watch as watching

pytestmark = pytest.mark.explains

NAN = float("nan")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def rows_bad(*rows, size=3):
    x = torch.ones(size, 4)
    for row in rows:
        x[row] = NAN
    return x


def report_of(function):
    with pytest.raises(NonFiniteError) as raised, torch.no_grad():
        function()
    return raised.value.report


def test_a_forward_without_autograd_is_a_request(as_kept):
    net = make_net()
    with OverflowGuard(net) as guard:
        with torch.no_grad():
            net(rows_bad())
        report = report_of(lambda: net(rows_bad(1)))
        with torch.no_grad():
            net(rows_bad())  # is served as if nothing had been
        assert (guard.coverage().requests, guard.coverage().steps) == (3, 0)
    assert (report.step, report.rows, report.num_rows) == (1, [1], 3)
    assert report.requests is None
    assert report.explanation.cause == "bad data"
    text = str(report)
    as_kept(report.explanation)
    for word in ("the loss", "Step", "without autograd", "optimizer"):
        assert word not in text


TRAINING = re.compile(r"\b(step|loop|loss|labels|training|[Bb]ackward)\b")


def left_in_a_weight(net):
    net[0].weight.data[1] = NAN
    return rows_bad()


def large_in_a_row(net):
    net[0].weight.data[:, 0] = 3e38
    x = rows_bad()
    x[1, 0] = 1e3
    return x


@pytest.mark.parametrize(
    "fails", [lambda net: rows_bad(1), left_in_a_weight, large_in_a_row]
)
def test_a_request_is_not_told_of_training(fails, caplog, monkeypatch):
    monkeypatch.setattr(replayer, "LONG_SECONDS", 0.0)
    net = make_net()
    x = fails(net)
    with OverflowGuard(net):
        report = report_of(lambda: net(x))
        text = f"{report}\n{caplog.text}\n" + "\n".join(
            map(str, report.explanation.remedies)
        )
    assert not TRAINING.findall(text), text


def test_what_is_computed_between_forwards_is_to_be_run_by_the_guard():
    net, other = make_net(), nn.Linear(4, 4)
    x = other(torch.ones(3, 4)) * NAN
    with OverflowGuard(net):
        report = report_of(lambda: net(x))
    assert report.explanation.notes[-1].endswith("within `guard.run(lambda: ...)`.")


def test_rows_are_named_by_the_ids_of_a_request(as_kept):
    net = make_net()
    with OverflowGuard(net) as guard, pytest.raises(NonFiniteError) as raised:
        with torch.inference_mode(), guard.request(ids=["a", "b", "c"]):
            net(rows_bad())
            net(rows_bad(0, 2))
            net(rows_bad(1))
    report = raised.value.report
    assert report.requests == ["a", "c"]
    assert (report.forward, report.num_forwards) == (1, 3)
    as_kept(raised.value)


class Pooled(Assembled):
    """Takes a dict, or texts and images of other numbers; returns a loss, too."""

    def forward(self, features, images=None):
        if images is not None:
            return {"scores": self.lin(images) @ self.lin(features).T}
        out = self.lin(features["x"])
        return {"loss": features["loss"] * out.sum(), "scores": out}


def judged(given, ids, *others):
    net = Pooled(lin=nn.Linear(4, 2)).eval()
    with OverflowGuard(net) as guard, pytest.raises(NonFiniteError) as raised:
        with torch.inference_mode(), guard.request(ids=ids):
            net(given, *others)
    return raised.value.report


def test_rows_are_found_in_a_batch_that_is_a_dict():
    report = judged({"x": rows_bad(1), "loss": torch.ones(())}, ["a", "b", "c"])
    assert (report.rows, report.requests) == ([1], ["b"])


def test_rows_are_those_of_the_argument_that_has_a_row_for_each_name():
    report = judged(torch.ones(2, 4), ["a", "b", "c"], rows_bad(2))
    assert (report.rows, report.requests) == ([2], ["c"])


def test_a_loss_that_is_returned_is_not_said_to_be_finite():
    report = judged({"x": rows_bad(), "loss": torch.tensor(NAN)}, ["a", "b", "c"])
    assert report.rows is None and not report.are_requests_known


def test_what_a_request_was_given_is_not_left_by_it():
    with torch.inference_mode():
        x = rows_bad(1)
    assert judged({"x": x, "loss": torch.ones(())}, ["a", "b", "c"]).poisoned == {}


def test_an_argument_of_inference_mode_is_not_said_to_be_left():
    net = make_net()
    with OverflowGuard(net, explain=False), pytest.raises(NonFiniteError) as raised:
        with torch.inference_mode():
            net(rows_bad(1))
    assert raised.value.report.poisoned == {}


@pytest.mark.parametrize(
    ("rows", "size", "requests", "is_known"),
    [
        ([1], 2, ["b"], True),
        ([2], 4, ["a", "b"], False),  # a beam search's b, or guidance's a
        ([0], 4, ["a"], True),
        ([0, 1, 2, 3], 4, ["a", "b"], True),
        ([2], 3, ["a", "b"], False),
    ],
)
def test_rows_that_belong_to_no_known_request_are_said_not_to(
    rows, size, requests, is_known
):
    net = make_net()
    with OverflowGuard(net, explain=False) as guard:
        with pytest.raises(NonFiniteError) as raised, torch.no_grad():
            with guard.request(ids=["a", "b"]):
                net(rows_bad(*rows, size=size))
    report = raised.value.report
    assert (report.requests, report.are_requests_known) == (requests, is_known)


@pytest.mark.parametrize(
    ("rows", "requests"),
    [([0, 0, 1, 1, 2, 2], ["b"]), ([0, 1, 2, 0, 1, 2], ["a", "c"]), ([0] * 6, None)],
)
def test_rows_that_the_first_forward_shows_to_be_of_one_name_are_told(rows, requests):
    """Those of beams stand together; guidance without a classifier has all again."""
    net, ids = make_net(), ["a", "b", "c"]
    with OverflowGuard(net, explain=False) as guard:
        with pytest.raises(NonFiniteError) as raised, torch.no_grad():
            with guard.request(ids=ids):
                net(torch.randn(3, 4)[rows])
                net(rows_bad(2, 3, size=6))
    report = raised.value.report
    assert report.requests == (requests or ids)
    assert report.are_requests_known == (requests is not None)


def test_a_replay_tells_of_which_name_repeated_rows_are():
    net, x = make_net(), torch.ones(3, 4)
    x[1] = 0

    def guided():
        return net(torch.cat([x / x.sum(1, keepdim=True)] * 2))

    with OverflowGuard(net) as guard, pytest.raises(NonFiniteError) as raised:
        with torch.no_grad(), guard.request(ids=["a", "b", "c"]):
            guard.run(guided)
    report = raised.value.report
    assert (report.rows, report.num_rows) == ([1, 4], 6)
    assert (report.requests, report.are_requests_known) == (["b"], True)


def test_what_a_pipeline_has_computed_between_forwards_is_not_called_data():
    net, up = make_net(), nn.Linear(2, 4).eval()
    with OverflowGuard({"net": net, "up": up}) as guard:
        with torch.no_grad(), pytest.raises(NonFiniteError) as raised:
            with guard.request(ids=["a"]):
                up((net(torch.ones(1, 4)) * 0).log().sqrt())
    report = raised.value.report
    assert report.explanation.cause == "unknown"
    assert any("guard.run(" in note for note in report.explanation.notes)
    assert "training loop" not in str(report)


@pytest.mark.parametrize("is_last", [True, False])
def test_what_a_later_forward_held_is_not_said_to_have_been_before(is_last):
    net, large = make_net(), rows_bad()
    nn.init.ones_(net[0].weight)
    large[1] = 3e38
    with OverflowGuard(net, explain=False) as guard:
        with torch.no_grad(), pytest.raises(NonFiniteError) as raised:
            with guard.request():
                net(rows_bad())
                net(large)
                if not is_last:
                    net(rows_bad())
    assert ("last seen finite" in str(raised.value.report)) == is_last


class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, x):
        return self.lin(x)

    def encode(self, texts):
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        return self(torch.stack([texts[i].sum(0) for i in order]))

    def encode_in_order(self, texts):
        return self(torch.stack([text.sum(0) for text in texts]))


@pytest.mark.parametrize("name", ["encode", "encode_in_order"])
def test_rows_that_code_between_may_have_sorted_name_no_request(name):
    net, texts = Encodes().eval(), [torch.ones(n, 4) for n in (1, 2, 3)]
    texts[0][:] = NAN
    _ = sorted([2, 1])  # by the program itself, before it gives names
    with OverflowGuard(net) as guard, pytest.raises(NonFiniteError) as raised:
        with torch.no_grad(), guard.request(ids=["a", "b", "c"]):
            getattr(net, name)(texts)
    report, is_known = raised.value.report, name == "encode_in_order"
    assert report.rows == [0 if is_known else 2]
    assert report.are_requests_known == is_known
    assert report.requests == (["a"] if is_known else ["a", "b", "c"])
    assert any("encode() (test_requests.py" in n for n in report.notes) != is_known


@pytest.mark.slow
def test_one_line_a_bad_request_is_logged(caplog):
    net = make_net()
    with OverflowGuard(net, on_overflow="warn") as guard, torch.no_grad():
        with caplog.at_level(logging.WARNING, "overflow_fast"):
            for i in range(5):
                with guard.request(ids=[f"r{i}"]):
                    net(rows_bad(*([0] * (i != 2)), size=1))
            told = [record.getMessage() for record in caplog.records]
    assert len(told) == 4
    names = [text.split("Request ")[1].split(":")[0] for text in told]
    assert names == ["r0", "r1", "r3", "r4"]
    assert all("\n" not in text for text in told)
    assert "Bad data" in told[0]


def test_a_callable_gets_rows_and_requests():
    net, seen = make_net(), []

    def policy(report):
        seen.append((report.rows, report.requests, report.explanation.cause))
        return "warn"

    with OverflowGuard(net, on_overflow=policy) as guard, torch.no_grad():
        with guard.request(ids=list("abc")):
            net(rows_bad(2))
    assert seen == [([2], ["c"], "bad data")]


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_a_callable_does_not_replace_the_programs_own(raises):
    def policy(report):
        raise KeyError("the pager is down")

    net = make_net()
    with OverflowGuard(net, on_overflow=policy, explain=False) as guard:
        kind = ValueError if raises else KeyError
        with pytest.raises(kind) as raised, torch.no_grad(), guard.request():
            net(rows_bad(2))
            if raises:
                raise ValueError("own")
        assert guard.metrics()["bad_requests_total"] == 1
        assert guard.last_report.action == "raise"
        if raises and sys.version_info >= (3, 11):
            assert guard.last_report.headline() in raised.value.__notes__[0]


def test_an_error_of_the_guards_own_does_not_reach_the_program(monkeypatch):
    def fails(*given):
        raise ValueError("of the guard")

    monkeypatch.setattr(LeftState, "by", fails)
    net = make_net()
    with OverflowGuard(net, explain=False) as guard, torch.no_grad():
        with guard.request():
            net(rows_bad(2))
        net(rows_bad(2))
    assert guard.coverage().failures == 2


def test_numbers_count_requests_forwards_and_tokens(tmp_path):
    class Embeds(Assembled):
        def forward(self, input_ids):
            return self.table(input_ids)

    net, sent = Embeds(table=nn.Embedding(5, 4)), []
    guard = OverflowGuard(
        *(net, None, "warn"),
        metrics=lambda step, numbers: sent.append((step, numbers)),
        record=tmp_path / "run.ofr",
        explain=False,
    )
    with torch.no_grad():
        net(torch.zeros(2, 3, dtype=torch.long))
        net.table.weight[1] = NAN
        with guard.request():
            net(torch.zeros(2, 1, dtype=torch.long))
            net(torch.ones(2, 1, dtype=torch.long))
    numbers = guard.metrics()
    assert numbers["requests_total"] == 2
    assert numbers["bad_requests_total"] == 1
    assert (numbers["forwards_total"], numbers["tokens_total"]) == (3, 10)
    assert [step for step, _ in sent] == [0, 1]
    assert 0 < guard.cost.share < 1
    assert guard.last_report.step == 1
    guard.remove()
    assert (tmp_path / "run.ofr").exists()


def test_a_schedule_leaves_requests_out():
    net = make_net()
    with OverflowGuard(net, on_overflow="warn", schedule=3, explain=False) as guard:
        for i in range(6):
            with torch.no_grad(), guard.request(ids=[i]):
                net(rows_bad(0, size=1))
        numbers = guard.metrics()
        assert numbers["bad_requests_total"] == numbers["steps_watched_total"] == 2


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_a_request_that_is_left_out_ends_with_the_call_that_it_began_with(options):
    vae = Vae(encoder=nn.Linear(4, 4), decoder=make_net()).eval()
    with OverflowGuard(vae, schedule=3, **options) as guard:
        for i in range(3):  # 1 and 2 are left out
            for call in (vae, vae.decode):
                with torch.no_grad(), guard.request(ids=[i]):
                    call(rows_bad())
        for call in (vae, vae.decode):
            report_of(lambda: call(rows_bad(1)))  # noqa: B023


@pytest.mark.parametrize(
    "options", [{}, {"sync": "lagged"}, {"watch": "tripwire"}], ids=str
)
def test_a_request_is_judged_at_its_end_where_stats_come_late_from_a_device(
    emulated, options
):
    emulated.state.holds_events = 1
    net = make_net()
    with OverflowGuard(net, explain=False, _defer=True, **options) as guard:
        assert report_of(lambda: net(rows_bad(1))).step == 0
        with torch.no_grad(), guard.request(ids=["good"]):
            net(rows_bad())
        with torch.no_grad(), pytest.raises(NonFiniteError) as raised:
            with guard.request(ids=["bad"]):
                net(rows_bad(0, size=1))
    assert raised.value.report.requests == ["bad"]


# Outputs behind the models.


def test_what_a_function_returns_is_judged():
    net = make_net()
    mask = torch.ones(3, 5, 1)
    mask[1] = 0

    def embed():
        return (net(torch.ones(3, 5, 4)) * mask).sum(1) / mask.sum(1)

    with OverflowGuard(net) as guard:
        report = report_of(lambda: guard.run(embed))
    assert report.verdict.first.label == "output"
    assert report.rows == [1]
    assert report.explanation.cause == "empty reduction"
    assert report.explanation.remedies[0].is_recommended


def test_what_a_request_records_is_judged_at_its_end():
    net = make_net()
    with OverflowGuard(net) as guard:
        with pytest.raises(NonFiniteError) as raised, torch.no_grad():
            with guard.request(ids=["a", "b"]):
                scores = net(torch.ones(2, 4)).sum(1)
                guard.record(scores=scores / torch.tensor([1.0, 0.0]))
        assert guard.check() is None
    report = raised.value.report
    assert (report.verdict.first.label, report.requests) == ("scores", ["b"])
    (note,) = report.explanation.notes  # of no forward, which ran, and of no loss
    assert note.startswith("The request was not replayed: `guard.record()` keeps ")
    assert "loss" not in str(report) and "`guard.run()`" in str(raised.value)


def test_what_a_function_returns_has_the_number_of_its_last_forward():
    net = make_net()

    def scored(weights):
        return net(torch.ones(2, 4)) / weights

    with OverflowGuard(net) as guard, torch.no_grad():
        with pytest.raises(NonFiniteError) as raised, guard.request():
            for divisor in (1.0, 0.0, 1.0):
                guard.run(functools.partial(scored, torch.tensor(divisor)))
    assert ", forward 1 of 3 (from 0): the recorded `output`" in str(raised.value)


# State.


class Cached(Assembled):
    """Writes what it is given to a slot of its cache, and reads all of the slot."""

    def forward(self, x, slot, place=0):
        self.cache[slot, place] = x
        return self.lin(self.cache[slot].sum(0, keepdim=True))


@pytest.mark.slow
def test_a_slot_that_a_bad_request_has_left_is_named(as_kept):
    net = Cached(lin=nn.Linear(4, 4), cache=nn.Buffer(torch.zeros(3, 2, 4))).eval()
    with OverflowGuard(net) as guard:
        with torch.no_grad(), pytest.raises(NonFiniteError) as raised:
            with guard.request(ids=["first"]):
                net(torch.full((4,), NAN), 1)
        assert raised.value.report.poisoned == {"cache": [1]}
        as_kept(raised.value)
        with torch.no_grad():
            net(torch.ones(4), 0)  # another slot
        with torch.no_grad(), pytest.raises(NonFiniteError) as raised:
            with guard.request(ids=["second"]):
                net(torch.ones(4), 1, 1)
    report = raised.value.report
    assert report.left_by == "Request first"
    assert report.poisoned == {}
    assert report.explanation.tensor == "cache"


def test_buffers_of_later_layers_are_left_out():
    class Attention(nn.Module):
        def __init__(self, is_bad=False):
            super().__init__()
            self.o = nn.Linear(8, 8)
            self.register_buffer("cache", torch.zeros(4, 8))
            if is_bad:
                self.cache[2:] = NAN

        def forward(self, x):
            self.cache[0] = x[0]
            return self.o((torch.tensor([1.0, 0, 0, 0]) @ self.cache)[None])

    net = nn.Sequential(Attention(True), Attention(), Attention())
    with OverflowGuard(net):
        report = report_of(lambda: net(torch.ones(1, 8)))
    assert report.explanation.tensor == "0.cache"
    assert sorted(report.poisoned) == ["1.cache", "2.cache"]
    assert "the buffer 1.cache" not in str(report)


class Counts(Assembled):
    """Fails in its third forward alone, by a counter that is no tensor."""

    def forward(self, x):
        self.count += 1
        return self.lin(x) / (self.count != 3)


def test_a_replay_begins_with_the_counters_of_the_forward():
    net = Counts(lin=nn.Linear(4, 4), count=0).eval()
    with OverflowGuard(net):
        with torch.no_grad():
            net(torch.ones(1, 4))
            net(torch.ones(1, 4))
        report = report_of(lambda: net(torch.ones(1, 4)))
        assert net.count == 3
    assert report.explanation.op.name.startswith("aten.div")


def test_the_arguments_of_a_forward_are_as_they_were():
    class Appends(Assembled):
        def forward(self, x, cache):
            cache["keys"].append(self.lin(x))
            total = torch.stack(cache["keys"]).sum(0)
            return total / (len(cache["keys"]) != 2)

    net, cache = Appends(lin=nn.Linear(4, 4)).eval(), {"keys": []}
    with OverflowGuard(net):
        with torch.no_grad():
            net(torch.ones(2, 4), cache=cache)
        report = report_of(lambda: net(torch.ones(2, 4), cache=cache))
        assert len(cache["keys"]) == 2
        with torch.no_grad():
            net(torch.ones(2, 4), cache=cache)
    assert report.explanation.op.name.startswith("aten.div")


class ReadsCache(nn.Module):
    """Writes to a place of a cache that it is given, and reads the first places."""

    def __init__(self):
        super().__init__()
        self.o = nn.Linear(4, 4)

    def forward(self, x, kv, place=1):
        kv[:, place] = x
        weights = torch.zeros(kv.shape[:2])
        weights[:, : place + 1] = 1
        return self.o((weights[..., None] * kv).sum(1))


def test_a_cache_that_is_given_by_a_keyword_has_that_name():
    net, kv = ReadsCache().eval(), torch.zeros(2, 6, 4)
    with OverflowGuard(net, explain=False):
        report = report_of(lambda: net(rows_bad(1, size=2), kv=kv))
    assert report.poisoned == {"kv": [1]}


# Submodules that a program calls alone, and exceptions of its own.


class Vae(Assembled):
    def decode(self, z):
        return self.decoder(z)

    def forward(self, x):
        return self.decode(self.encoder(x))


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_a_submodule_that_is_called_alone_is_a_request(options):
    vae = Vae(encoder=nn.Linear(4, 4), decoder=make_net()).eval()
    with OverflowGuard(vae, **options):
        report = report_of(lambda: vae.decode(rows_bad(2)))
        with torch.no_grad():
            vae.decode(rows_bad())
    assert report.rows == [2]
    assert report.explanation.cause == "bad data"
    assert not vae.decoder._forward_hooks and not vae.decoder._forward_pre_hooks


def test_a_module_within_a_model_has_a_hook_at_its_end_once_it_is_called_alone():
    vae = Vae(encoder=nn.Linear(4, 4), decoder=make_net()).eval()
    with OverflowGuard(vae, watch="tripwire"), torch.no_grad():
        vae(rows_bad())
        assert not vae.decoder._forward_hooks and not vae.encoder._forward_hooks
        vae.decode(rows_bad())
        vae.decode(rows_bad())
        assert len(vae.decoder._forward_hooks) == 1
        assert not vae.encoder._forward_hooks


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_an_encoder_within_a_submodule_is_a_request_too(options):
    """As of transformers' models of that kind, whose generation calls it first."""
    whole = nn.Sequential(Vae(encoder=nn.Linear(4, 4), decoder=make_net())).eval()
    with OverflowGuard(whole, **options):
        report = report_of(lambda: whole[0].encoder(rows_bad(2)))
    assert (report.rows, report.explanation.cause) == ([2], "bad data")


def test_an_exception_of_the_programs_own_has_the_report():
    net = make_net()
    with OverflowGuard(net) as guard:
        with pytest.raises(RuntimeError, match="probability") as raised:
            with torch.no_grad(), guard.request(ids=["a", "b", "c"]):
                logits = net(rows_bad(1))
                torch.multinomial(logits.softmax(-1), 1)
    report = guard.last_report
    assert (report.requests, report.raised) == (["b"], "RuntimeError")
    if sys.version_info >= (3, 11):
        assert "Request b" in raised.value.__notes__[0]


def test_a_request_that_memory_was_too_small_for_is_not_run_again():
    net = make_net()
    with OverflowGuard(net, explain=True) as guard:
        with pytest.raises(MemoryError), torch.no_grad(), guard.request():
            net(rows_bad(1))
            raise MemoryError("own")
    assert guard.last_report.explanation is None


def test_a_sample_tells_the_request_where_a_forward_has_returned_nothing(as_kept):
    class Refuses(nn.Module):
        def forward(self, x):
            if not bool(torch.isfinite(x.log()).all()):
                raise ValueError("refused")
            return x

    net = nn.Sequential(nn.Linear(4, 4), Refuses())
    with OverflowGuard(net) as guard:
        with pytest.raises(ValueError, match="refused"), torch.no_grad():
            with guard.request(ids=["a", "b", "c"]):
                net(rows_bad(1))
    report = guard.last_report
    assert (report.rows, report.requests) == (None, ["b"])
    as_kept(report.sentences())


def test_a_request_without_a_bad_value_keeps_its_own_exception():
    net = make_net()
    with OverflowGuard(net) as guard:
        with pytest.raises(KeyError), torch.no_grad(), guard.request():
            net(rows_bad())
            raise KeyError("x")
        assert guard.last_report is None


# The tripwire: outputs alone.


def test_a_bad_request_of_a_tripwire_is_explained_whatever_ran_before():
    for num_before in (0, 2):
        net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
        with OverflowGuard(net, on_overflow="warn", watch="tripwire") as guard:
            with torch.no_grad():
                for _ in range(num_before):
                    net(torch.ones(1, 2))
                net(torch.full((1, 2), float("nan")))
        assert "bad data" in str(guard.last_report.explanation)


def test_a_tripwire_sees_outputs_alone_and_then_everything():
    class Overflows(Assembled):
        def forward(self, x):
            return {"scores": self.norm(self.up(x) * 1e4)}

    net = Overflows(up=nn.Linear(4, 4), norm=nn.Linear(4, 2)).half().eval()
    nn.init.ones_(net.up.weight)  # -inf alone may be a mask
    with OverflowGuard(net, watch="tripwire") as guard:
        with torch.no_grad():
            net(torch.full((2, 4), 1e-3).half())
        assert guard.coverage().tensors_scanned == 1
        report = report_of(lambda: net(torch.full((2, 4), 1e3).half()))
    assert report.verdict.first.fqn == "norm"
    assert report.explanation.cause == "range overflow"
    assert "aten.mul" in report.explanation.op.name


def test_no_loss_is_looked_for_in_what_a_token_has_returned(monkeypatch):
    looked = []
    monkeypatch.setattr(watching, "model_loss_in", looked.append)
    net = make_net()
    with OverflowGuard(net, watch="tripwire"):
        with torch.no_grad():
            net(torch.ones(2, 4))
        assert not looked
        net(torch.ones(2, 4))
    assert looked


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_clean_outputs_are_the_same_bit_for_bit(options):
    net, x = make_net(), torch.randn(3, 4)
    with torch.no_grad():
        before = net(x)
        state = torch.get_rng_state()
        with OverflowGuard(net, **options) as guard:
            with guard.request(ids=list("abc")):
                assert torch.equal(net(x), before)
            assert torch.equal(net(x), before)
        assert torch.equal(torch.get_rng_state(), state)


# Threads.


def serve(guard, net, number, num_requests, is_bad, wrong):
    for i in range(num_requests):
        name = f"{number}-{i}"
        try:
            with torch.inference_mode(), guard.request(ids=[name]):
                net(rows_bad(0, size=1) if is_bad(number, i) else rows_bad(size=1))
            got = None
        except NonFiniteError as error:
            got = error.report
        if (got is not None) != is_bad(number, i):
            wrong.append((name, got))
        if got is not None and (got.requests != [name] or name not in str(got)):
            wrong.append((name, str(got)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_threads", "num_requests", "explain"), [(8, 125, False), (4, 10, True)]
)
def test_no_innocent_request_gets_an_error(hurry, num_threads, num_requests, explain):
    net, wrong = make_net(), []

    def is_bad(number, i):
        return number == 2 and i % 3 == 0

    with OverflowGuard(net, explain=explain) as guard:
        threads = [
            threading.Thread(
                target=serve, args=(guard, net, n, num_requests, is_bad, wrong)
            )
            for n in range(num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert guard.check() is None
        assert guard.metrics()["requests_total"] == num_threads * num_requests


def test_a_request_that_runs_is_waited_for_no_longer_than_a_while():
    class Slow(Assembled):
        def forward(self, x):
            if threading.current_thread() is slow:
                entered.set()
                goes_on.wait(30)
            return self.lin(x)

    net, outputs = Slow(lin=nn.Linear(4, 4)).eval(), []
    entered, goes_on = threading.Event(), threading.Event()

    def run():
        with torch.no_grad():
            outputs.append(net(torch.ones(1, 4)))

    slow = threading.Thread(target=run)
    with OverflowGuard(net) as guard:
        slow.start()
        assert entered.wait(30)
        report = report_of(lambda: net(torch.full((1, 4), NAN)))
        assert report.explanation is None and "once it is answered" in report.notes[0]
        guard._parts.requests.finish()
        goes_on.set()
        slow.join()
        assert "other threads ran the models" in report.explanation.notes[0]
        again = report_of(lambda: net(torch.full((1, 4), NAN)))
    assert again.explanation.cause == "bad data"
    assert len(outputs) == 1


def test_a_forward_that_ends_while_a_replay_waits_for_it_is_not_held_up():
    class Waits(Assembled):
        def forward(self, x):
            if threading.current_thread() is other:
                entered.set()
                while guard._parts.requests._gate._owner is None:
                    time.sleep(0.001)
            return self.lin(x)

    net, entered = Waits(lin=nn.Linear(4, 4)).eval(), threading.Event()

    def run():
        with torch.no_grad():
            net(torch.ones(1, 4))

    other = threading.Thread(target=run)
    with OverflowGuard(net) as guard:
        other.start()
        assert entered.wait(30)
        report = report_of(lambda: net(torch.full((1, 4), NAN)))
        other.join()
    assert report.explanation.cause == "bad data"


def test_outputs_that_are_minus_inf_are_not_said_to_be_left_out():
    class Scores(Assembled):
        def forward(self, x):
            return x * self.log_scale.exp()

    net = Scores(log_scale=nn.Parameter(torch.tensor(12.0))).half().eval()
    with OverflowGuard(net) as guard:
        report = report_of(lambda: net(-torch.ones(2, 4).half()))
    assert report.explanation.cause == "range overflow"
    assert not any("hidden" in each for each in report.explanation.evidence)
    assert guard.last_report is report


def test_a_tripwire_says_nothing_of_models_that_a_pooling_behind_them_follows():
    net = make_net()
    with OverflowGuard(net, watch="tripwire", on_overflow="warn") as guard:
        with torch.no_grad():
            guard.run(lambda: net(torch.ones(2, 4)) / torch.tensor(0.0) * 0)
    report = guard.last_report
    assert report.explanation.cause in ("undefined", "product with inf")
    assert "transient" not in str(report)


def test_the_time_of_a_request_is_that_of_its_own_thread():
    """Another one that begins and ends within it takes nothing from it."""

    class Meets(nn.Linear):
        def forward(self, x):
            if waits:
                began = time.perf_counter()
                waits.pop().start()
                other.join()
                times.append(time.perf_counter() - began)
            return super().forward(x)

    def call():
        with torch.no_grad():
            net(torch.ones(3, 4))

    net, times = Meets(4, 2), []
    other = threading.Thread(target=call)
    waits = [other]
    with OverflowGuard(net) as guard:
        call()
        assert guard.cost.step_seconds >= times[0] > 0
        assert 0 < guard.cost.share <= 1


def test_what_a_tripwire_takes_behind_a_forward_is_measured_with_the_next(monkeypatch):
    ticks = itertools.count(1)
    net, costs = make_net(), []
    with OverflowGuard(net, watch="tripwire") as guard, torch.no_grad():
        net(rows_bad())
        monkeypatch.setattr(forwards, "perf_counter", lambda: float(next(ticks)))
        for _ in range(3):
            net(rows_bad())
            costs.append(guard.cost.guard_seconds)
    assert round(costs[2]) == 4  # to hold it; when it ends, and the rest of the last


@pytest.mark.parametrize("is_bad", [False, True])
def test_the_end_of_a_request_is_of_its_cost_and_no_replay_is(is_bad, monkeypatch):
    class Slow(nn.Linear):
        def forward(self, x):
            clock[0] += 1000.0
            return super().forward(x)

    net, clock, judge = Slow(4, 2).eval(), [1.0], Requests._judge

    def judged(self, request, error):
        clock[0] += 100.0
        judge(self, request, error)

    for module in (forwards, again):
        monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(Requests, "_judge", judged)
    with OverflowGuard(net) as guard, contextlib.suppress(NonFiniteError):
        with torch.no_grad(), guard.request():
            net(rows_bad(*[1] * is_bad))
    assert (clock[0] > 1200) == is_bad  # it was run again
    assert 100 <= guard.cost.guard_seconds < 200


def test_a_finite_forward_of_a_tripwire_keeps_nothing_of_its_arguments():
    net, x = make_net(), rows_bad()
    held = weakref.ref(x)
    with OverflowGuard(net, watch="tripwire") as guard, torch.no_grad():
        with guard.request():
            net(x)
            del x
            assert held() is None


def normed():
    """An image classifier in float16, whose running variance is beyond 65504."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten()).eval()
    with torch.no_grad():
        net[0].weight.mul_(2e3)
        net[1].running_var.fill_(1e6)
    return net


@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
def test_a_buffer_that_a_cast_has_made_inf_is_said_once(options, caplog):
    with OverflowGuard(normed().half(), **options):
        net = normed().half()
    with OverflowGuard(net, **options), torch.no_grad():
        for _ in range(2):
            net(torch.ones(1, 3, 4, 4).half())
    (said,) = [e.getMessage() for e in caplog.records if "Before" in e.getMessage()]
    assert "1.running_var (8 of 8 values)" in said
    assert "overflow_fast.keep_in_fp32(model, ['1'])" in said


def test_a_buffer_with_the_minus_inf_of_a_mask_is_meant(caplog):
    mask = nn.Buffer(torch.full((4, 4), -torch.inf).triu(1))
    net = Assembled(mask=mask, lin=nn.Linear(4, 4)).eval()
    net.forward = lambda x: net.lin(x)
    with OverflowGuard(net), torch.no_grad():
        net(torch.ones(2, 4))
    assert not any("Before the first" in each.getMessage() for each in caplog.records)


def test_memory_that_beta_leaves_out_is_not_the_cause():
    class Scores(Assembled):
        def forward(self, x):
            q = self.lin(x)
            room = torch.empty(2, 8, 8, dtype=x.dtype).fill_(NAN).new_empty(2, 8, 8)
            return torch.baddbmm(room, q, q.mT, beta=0)

    torch.manual_seed(0)
    net = Scores(lin=nn.Linear(16, 16)).eval()
    with torch.no_grad():
        net.lin.weight.mul_(900)
    with OverflowGuard(net.half()):
        report = report_of(lambda: net(torch.randn(2, 8, 16).half()))
    assert report.explanation.cause == "range overflow"
    assert report.explanation.op.name == "aten.baddbmm"


def test_a_token_id_is_no_index_of_a_dataset():
    class Step(Assembled):
        def forward(self, ids):
            return self.emb(ids).square()

    net = Step(emb=nn.Embedding(8, 4)).eval()
    with torch.no_grad():
        net.emb.weight[5] = 1e3
    with OverflowGuard(net.half()):
        report = report_of(lambda: net(torch.tensor([1, 2, 5])))
    sample = report.explanation.sample
    assert int(sample) == 2 and sample.dataset is None


@pytest.mark.parametrize("is_function", [False, True])
def test_a_forward_has_its_own_number_where_it_is_run_again(is_function):
    net = make_net()
    net[2].weight.data.fill_(1e38)

    def run():
        return [net(rows_bad() * factor) for factor in (0, 1e30, 0, 0)]

    with OverflowGuard(net, watch="tripwire") as guard:

        def request():
            with guard.request():
                guard.run(run) if is_function else run()

        report = report_of(request)
    assert report.forward == 1 and "during batch_number=1\n" in str(report)


class Filtered(Assembled):
    """Keeps the largest logits, as a sampler does."""

    def forward(self, x):
        logits = self.layer(x)
        least = logits.topk(2).values[..., -1:]
        return self.last(logits.masked_fill(logits < least, -torch.inf))


def make_filtered(last=None):
    torch.manual_seed(0)
    return Filtered(layer=nn.Linear(4, 8), last=last or nn.Identity()).eval()


@pytest.mark.parametrize("watch", [(), ("tripwire",)])
def test_masks_are_served_and_logged_once(watch, caplog):
    net, served = make_filtered(), []
    with OverflowGuard(net, **({"watch": watch[0]} if watch else {})), torch.no_grad():
        served += [net(rows_bad()) for _ in range(3)]
        report_of(lambda: net(rows_bad(1)))  # as it was
    assert all(each.isneginf().sum() == 18 for each in served)
    lines = [e.getMessage() for e in caplog.records if "no alarm" in e.getMessage()]
    assert len(lines) == 1 and "Request 0" in lines[0] and "allow={" in lines[0]


class Softened(nn.Module):
    def forward(self, x):
        return x + x.sum(-1, keepdim=True)  # -inf, each value


def test_rows_without_a_finite_value_are_not_served():
    net = make_filtered(Softened())
    with OverflowGuard(net):
        for _ in range(2):
            report_of(lambda: net(rows_bad()))


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_plus_inf_that_code_has_written_is_served_by_a_rule_alone(options):
    class Edges(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0.5, torch.inf)

    net = nn.Sequential(nn.Identity(), Edges()).eval()
    with OverflowGuard(net, **options):
        for _ in range(2):
            found = report_of(lambda: net(rows_bad())).explanation
            assert found.cause == "constant"
    rule = {"*:output": "+inf"}
    with OverflowGuard(net, allow=rule, **options) as guard, torch.no_grad():
        net(rows_bad())
    assert guard.last_report is None


def test_a_request_with_masks_is_not_served_where_a_later_forward_is_bad():
    net = make_filtered()
    with OverflowGuard(net) as guard:

        def run(*batches):
            with guard.request():
                for each in batches:
                    net(each)

        assert report_of(lambda: run(rows_bad(), rows_bad(1))).forward == 1
        with torch.no_grad():
            run(rows_bad(), rows_bad())
        assert report_of(lambda: run(rows_bad(), rows_bad(1))).forward == 1


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_an_output_that_cannot_be_scanned_is_said_once(options, caplog):
    class Meta(nn.Module):
        def forward(self, x):
            return x.to("meta")

    net = nn.Sequential(Meta()).eval()
    with OverflowGuard(net, **options), torch.no_grad():
        for _ in range(2):
            net(rows_bad())
            messages = [each.getMessage() for each in caplog.records]
            assert sum("were not scanned" in each for each in messages) == 1


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_a_forward_after_one_that_was_interrupted_is_judged(options):
    class Stops(nn.Module):
        def forward(self, x):
            if x.max() > 5:
                raise KeyboardInterrupt
            return x.log()

    vae = Vae(encoder=Stops(), decoder=Stops()).eval()
    with OverflowGuard(vae, explain=False, **options), torch.no_grad():
        for call in (vae, vae.decode):
            with pytest.raises(KeyboardInterrupt):
                call(torch.full((2, 4), 9.0))
            report_of(lambda: vae(rows_bad(1)))


def test_a_module_that_calls_itself_is_judged_once_by_a_tripwire():
    class Twice(nn.Module):
        def forward(self, x):
            return self(x - 1) if x.max() > 0.5 else x

    net = nn.Sequential(Twice()).eval()
    for model in (net, net[0]):
        with OverflowGuard(model, watch="tripwire") as guard:
            with torch.no_grad():
                model(torch.full((2, 4), 2.0))
            assert guard.metrics()["forwards_total"] == 1


def test_a_forward_that_returns_none_where_an_exception_is_handled_has_not_raised():
    class Silent(nn.Module):
        def forward(self, x):
            return None

    net = nn.Sequential(Silent()).eval()
    with OverflowGuard(net, watch="tripwire") as guard, torch.no_grad():
        try:
            raise ValueError("of the program's")
        except ValueError:
            net(rows_bad())
        assert guard.metrics()["forwards_total"] == 1


class Around(nn.Module):
    """Runs a model within compiled code."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda net: net, Around])  # both without hooks
def test_a_tripwire_scans_what_a_model_returns_within_compiled_code(around):
    net = make_net()
    with OverflowGuard(net, watch="tripwire", on_overflow="warn") as guard:
        compiled = torch.compile(around(net), backend="aot_eager")
        with torch.no_grad(), guard.request():
            compiled(rows_bad())
            compiled(rows_bad(1))
    report, found = guard.last_report, guard.coverage()
    assert report.verdict.first.label == "output"
    assert (report.forward, report.token) == (1, None)
    assert (found.requests, found.tensors_listed) == (1, 2)
    assert "outputs were not checked" not in str(report)
