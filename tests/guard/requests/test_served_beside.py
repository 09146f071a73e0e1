"""Requests of a server: others are served while a bad one is explained."""

import asyncio
import contextlib
import logging
import threading
import time

import pytest
import torch
from assembled import Assembled
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.guard.requests.gate import Gate, let_others_pass, others_wait
from overflow_fast.options import Explain

pytestmark = pytest.mark.explains

NAN = float("nan")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def asked(guard, net, name, is_bad=True):
    """The report of a request; None for one that is answered."""
    x = torch.full((1, 4), NAN if is_bad else 1.0)
    try:
        with torch.inference_mode(), guard.request(ids=[name]):
            net(x)
    except NonFiniteError as error:
        return error.report
    return None


@contextlib.contextmanager
def another_open(guard):
    """Has a request open in another thread meanwhile."""
    begun, is_over = threading.Event(), threading.Event()

    def serve():
        with guard.request(ids=["other"]):
            begun.set()
            is_over.wait(30)

    other = threading.Thread(target=serve)
    other.start()
    begun.wait(30)
    try:
        yield
    finally:
        is_over.set()
        other.join()


def finish(guard):
    guard._parts.requests.finish()


@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
def test_a_bad_request_is_explained_behind_its_answer_where_others_are_served(
    options, caplog
):
    net = make_net()
    with OverflowGuard(net, **options) as guard, another_open(guard):
        report = asked(guard, net, "b")
        assert report.requests == ["b"] and report.rows == [0]
        finish(guard)
    assert report.explanation.cause == "bad data"
    assert report.verdict.first.fqn == "0" and not report.notes
    (line,) = [e.getMessage() for e in caplog.records if "Bad data" in e.getMessage()]
    assert "Request b" in line
    assert guard.metrics()["bad_requests_total"] == 1


@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
def test_a_later_one_at_its_place_names_the_first_and_is_not_run_again(options):
    net = make_net()
    with OverflowGuard(net, **options) as guard, another_open(guard):
        asked(guard, net, "first")
        finish(guard)
        later = asked(guard, net, "later")
        finish(guard)
    assert later.explanation is None and later.requests == ["later"]
    (note,) = later.notes
    assert "The first one at this place was: Request first" in note
    assert "Bad data" in note


def test_a_batch_in_a_thread_of_a_server_is_answered_before_it_is_run_again():
    net, calls, reports = make_net(), [], []
    net.register_forward_pre_hook(lambda *_: calls.append(threading.get_ident()))

    def serve():
        reports.append(asked(guard, net, "b"))

    with OverflowGuard(net, watch="tripwire") as guard:
        for _ in range(2):
            thread = threading.Thread(target=serve)
            thread.start()
            own = thread.ident
            thread.join()
            finish(guard)
            assert calls.count(own) == 1
            calls.clear()
    assert [each.explanation is not None for each in reports] == [True, False]


def test_each_is_explained_with_always():
    net = make_net()
    with OverflowGuard(net, explain=Explain("always")) as guard, another_open(guard):
        reports = []
        for name in "ab":
            reports.append(asked(guard, net, name))
            finish(guard)
    assert [each.explanation.cause for each in reports] == ["bad data"] * 2


def test_an_exception_of_the_program_is_searched_behind_its_answer(caplog):
    net = make_net()

    def draw():
        return torch.multinomial((net(torch.ones(1, 4)) * 0).log().softmax(-1), 1)

    with OverflowGuard(net) as guard, another_open(guard):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="probability"), torch.no_grad():
                guard.run(draw)
            finish(guard)
    said = [e.getMessage() for e in caplog.records if "Request" in e.getMessage()]
    assert len(said) == 1 and ".log()` holds 2 -inf" in said[0]


def test_the_loop_of_an_async_server_does_not_wait_for_an_explanation():
    net, calls = make_net(), []
    net.register_forward_pre_hook(lambda *_: calls.append(threading.get_ident()))

    async def serve():
        return asked(guard, net, "b")

    with OverflowGuard(net) as guard:
        report = asyncio.run(serve())
        finish(guard)
    assert report.explanation.cause == "bad data"
    assert calls.count(threading.get_ident()) == 1 < len(calls)


def test_a_script_has_each_explanation_in_the_exception():
    net = make_net()
    with OverflowGuard(net) as guard:
        for name in "ab":
            assert asked(guard, net, name).explanation.cause == "bad data"


def test_the_end_of_a_guard_waits_for_the_explanation():
    net = make_net()
    with OverflowGuard(net) as guard:
        with another_open(guard):
            report = asked(guard, net, "b")
    assert report.explanation.cause == "bad data"


def test_forwards_pass_between_the_runs_of_a_replay():
    gate, passed = Gate(1.0), []

    def forward():
        gate.enter()
        passed.append(time.perf_counter())
        gate.leave()

    with gate.alone() as is_alone:
        assert is_alone and not others_wait()
        other = threading.Thread(target=forward)
        other.start()
        while not others_wait():
            time.sleep(0.001)
        assert not passed
        let_others_pass()
        other.join()
        assert passed and not others_wait()
    assert not others_wait()


def test_a_forward_that_a_schedule_leaves_out_waits_for_a_run_too():
    net, answers = make_net(), []
    with OverflowGuard(net, schedule=2) as guard:
        assert asked(guard, net, "watched").requests == ["watched"]
        finish(guard)
        gate = guard._parts.requests._gate
        other = threading.Thread(
            target=lambda: answers.append(asked(guard, net, "left out"))
        )
        with gate.alone():
            other.start()
            began = time.monotonic()
            while not gate.is_wanted and time.monotonic() - began < 30:
                time.sleep(0.01)
            assert gate.is_wanted and not answers
        other.join()
    assert answers == [None]


def test_a_counter_that_a_forward_between_two_runs_has_moved_stays_moved():
    class Counts(Assembled):
        def forward(self, x):
            self.num.add_(1)
            return self.lin(x)

    def serve():
        while not is_over.is_set():
            asked(guard, net, "good", is_bad=False)
            num_served.append(1)

    torch.manual_seed(0)
    num = nn.Buffer(torch.zeros((), dtype=torch.long))
    net = Counts(num=num, lin=nn.Linear(4, 4)).eval()
    is_over, num_served = threading.Event(), []
    with OverflowGuard(net) as guard:
        other = threading.Thread(target=serve)
        other.start()
        with another_open(guard):
            report = asked(guard, net, "b")
        finish(guard)
        is_over.set()
        other.join()
    assert report.explanation.cause == "bad data"
    assert int(net.num) == len(num_served) + 1


def app_of(guard, net):
    """An app with an endpoint of each kind, and a task that makes batches."""
    fastapi = pytest.importorskip("fastapi")
    app, waiting, tasks = fastapi.FastAPI(), [], []

    def answer(names, sizes):
        try:
            with torch.inference_mode(), guard.request(ids=names):
                net(torch.tensor(sizes)[:, None].expand(-1, 4).contiguous())
            return dict.fromkeys(names, "answered")
        except NonFiniteError as error:
            found = error.report.requests
            rest = [i for i, name in enumerate(names) if name not in found]
            rows = [names[i] for i in rest], [sizes[i] for i in rest]
            answers = answer(*rows) if rest else {}
            return answers | {name: [name] for name in found}

    @app.get("/threads")
    def threads(name: str, size: float):
        return answer([name], [size])[name]

    @app.get("/asyncio")
    async def in_loop(name: str, size: float):
        return answer([name], [size])[name]

    @app.get("/batches")
    async def batches(name: str, size: float):
        async def run():
            while waiting:
                batch = waiting[:4]
                del waiting[:4]
                names, sizes, futures = map(list, zip(*batch, strict=True))
                answers = await asyncio.to_thread(answer, names, sizes)
                for each, future in zip(names, futures, strict=True):
                    future.set_result(answers[each])

        waiting.append((name, size, asyncio.get_running_loop().create_future()))
        future = waiting[-1][2]
        if not tasks or tasks[-1].done():
            tasks.append(asyncio.create_task(run()))
        return await future

    return app


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"watch": "tripwire"}])
@pytest.mark.parametrize("kind", ["threads", "asyncio", "batches"])
def test_no_innocent_request_of_a_server_is_harmed(kind, options, caplog):
    uvicorn, httpx = pytest.importorskip("uvicorn"), pytest.importorskip("httpx")
    caplog.set_level(logging.ERROR)
    net = make_net()

    async def main(app):
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url, numbers, answers = f"http://127.0.0.1:{port}/{kind}", iter(range(200)), {}

        async def client(http):
            for i in numbers:
                size = "inf" if i % 20 == 7 else "1"
                got = await http.get(url, params={"name": f"r{i}", "size": size})
                answers[f"r{i}"] = got.json()

        async with httpx.AsyncClient() as http:
            await asyncio.gather(*(client(http) for _ in range(8)))
        server.should_exit = True
        await running
        return answers

    with OverflowGuard(net, **options) as guard:
        answers = asyncio.run(main(app_of(guard, net)))
        finish(guard)
        assert guard.last_report is not None
        assert guard.metrics()["bad_requests_total"] == 10
    bad = {name for name, got in answers.items() if got != "answered"}
    assert bad == {f"r{i}" for i in range(200) if i % 20 == 7}
    assert all(answers[name] == [name] for name in bad)
