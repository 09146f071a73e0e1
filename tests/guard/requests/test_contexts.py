"""Which request a forward is of, and requests whose forwards run with autograd."""

import asyncio
import contextlib
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from assembled import Assembled
from guarding import report_from
from torch import nn

from overflow_fast import NonFiniteError, OverflowGuard
from overflow_fast.detector.steps import StepHooks
from overflow_fast.options import Schedule

pytestmark = pytest.mark.explains

NAN = float("nan")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def ran(net, is_bad=False):
    with torch.no_grad():
        return net(torch.full((1, 4), NAN if is_bad else 1.0))


def names(error):
    return error.report.requests


ANSWERS = {"a": "answered", "b": ["b"], "c": "answered"}


@pytest.fixture(params=["tripwire", None])
def served(request):
    net = make_net()
    watch = {} if request.param is None else {"watch": request.param}
    with OverflowGuard(net, explain=False, **watch) as guard:
        yield net, guard


def test_tasks_of_one_thread_have_requests_of_their_own(served):
    net, guard = served
    said = {}

    async def stream(name):
        try:
            with guard.request(ids=[name]):
                for token in range(3):
                    ran(net, name == "b" and token == 1)
                    await asyncio.sleep(0)
            said[name] = "answered"
        except NonFiniteError as error:
            said[name] = names(error)

    async def serve():
        await asyncio.gather(*map(stream, "abc"))

    asyncio.run(serve())
    assert said == ANSWERS and guard.metrics()["requests_total"] == 3


def test_what_a_task_gives_to_threads_is_of_its_request(served):
    net, guard = served

    async def endpoint(name):
        try:
            with guard.request(ids=[name]):
                one = asyncio.to_thread(ran, net)
                await asyncio.gather(one, asyncio.to_thread(ran, net, name == "b"))
            return "answered"
        except NonFiniteError as error:
            return names(error)

    async def serve():
        return dict(
            zip("abc", await asyncio.gather(*map(endpoint, "abc")), strict=True)
        )

    assert asyncio.run(serve()) == ANSWERS
    numbers = guard.metrics()
    assert (numbers["requests_total"], numbers["forwards_total"]) == (3, 6)


def test_a_context_manager_of_the_programs_begins_a_request_for_its_block(served):
    net, guard = served

    @contextlib.contextmanager
    def serving(name):
        with guard.request(ids=[name]):
            yield

    with guard.request(ids=["around"]):
        with pytest.raises(NonFiniteError) as raised, contextlib.ExitStack() as stack:
            stack.enter_context(serving("within"))
            ran(net, True)
    assert names(raised.value) == ["within"]


def test_a_request_may_end_in_another_task_or_thread(served):
    net, guard = served
    request = guard.request(ids=["a"])

    async def begin():
        request.__enter__()
        ran(net, True)

    async def end():
        with pytest.raises(NonFiniteError) as raised:
            request.__exit__(None, None, None)
        return names(raised.value)

    async def serve():
        await asyncio.create_task(begin())
        ran(net)  # of no request that has begun elsewhere
        return await asyncio.create_task(end())

    assert asyncio.run(serve()) == ["a"]
    with guard.request(ids=["b"]) as begun:
        pass
    assert begun.num_forwards == 0 and guard.check() is None


def test_what_goes_on_after_its_request_is_none_of_it(served):
    net, guard = served

    async def serve():
        ended = asyncio.Event()

        async def later():
            await ended.wait()
            ran(net, True)

        with guard.request(ids=["a"]):
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        ended.set()
        with pytest.raises(NonFiniteError) as raised:
            await task
        assert names(raised.value) is None

    asyncio.run(serve())


def test_threads_without_a_context_have_requests_of_their_own(served):
    net, guard = served
    with ThreadPoolExecutor(1) as executor, guard.request(ids=["a"]):
        found = executor.submit(ran, net, True).exception()
    assert names(found) is None


def test_an_abandoned_generator_leaves_nothing_behind(served):
    net, guard = served

    def stream():
        with guard.request(ids=["gone"]):
            ran(net, True)
            yield

    next(stream())
    with pytest.raises(NonFiniteError) as raised, guard.request(ids=["a"]):
        ran(net, True)
    assert names(raised.value) == ["a"]


def test_each_call_of_a_decorated_function_is_a_request(served):
    net, guard = served
    barrier = threading.Barrier(2)

    @guard.request(ids=["a"])
    def answer(is_bad):
        barrier.wait(30)
        ran(net, is_bad)
        barrier.wait(30)

    with ThreadPoolExecutor(2) as executor:
        found = [executor.submit(answer, is_bad) for is_bad in (True, False)]
        errors = [each.exception() for each in found]
    assert names(errors[0]) == ["a"] and errors[1] is None


def test_a_request_that_a_schedule_leaves_out_hides_no_other():
    net, said = make_net(), {}
    guard = OverflowGuard(net, explain=False, schedule=Schedule(every=2))

    async def stream(name):
        try:
            with guard.request(ids=[name]):
                await asyncio.sleep(0)
                await asyncio.to_thread(ran, net, True)
                ran(net, True)
                guard.record(scores=torch.tensor(NAN))
                await asyncio.sleep(0)
            said[name] = "answered"
        except NonFiniteError as error:
            said[name] = names(error)

    async def serve():
        await asyncio.gather(*map(stream, "abcd"))

    with guard:
        asyncio.run(serve())
    assert said == {"a": ["a"], "b": "answered", "c": ["c"], "d": "answered"}
    assert guard.check() is None


class Frozen(Exception):
    def __setattr__(self, name, value):
        raise AttributeError("frozen")


@pytest.mark.parametrize("kind", [Frozen, KeyboardInterrupt, asyncio.CancelledError])
def test_the_exception_of_a_request_stays_the_programs(served, kind):
    net, guard = served
    for run in (ran, lambda *given: guard.run(lambda: ran(*given))):
        with pytest.raises(kind), guard.request():
            run(net)
            raise kind
    assert guard.last_report is None


# With autograd.


class Forces(Assembled):
    """Returns minus the gradient of an energy, as potentials of atoms do."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.lin(x).sum() + x.abs().sqrt().sum()
        (gradient,) = torch.autograd.grad(energy, x)
        return -gradient


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
@pytest.mark.parametrize("is_training", [False, True])
def test_a_request_is_judged_with_autograd_too(options, is_training):
    net = make_net().train(is_training)
    nn.init.ones_(net[0].weight)
    x = torch.ones(3, 4)
    x[1] = 3e38
    with OverflowGuard(net, **options) as guard:
        with pytest.raises(NonFiniteError) as raised, guard.request(ids=list("abc")):
            net(x)
        report = raised.value.report
        assert report.requests == ["b"]
        assert report.explanation.cause == "range overflow"
        with guard.request(ids=list("abc")):
            net(torch.ones(3, 4))
        numbers = guard.metrics()
        assert (numbers["requests_total"], numbers["forwards_total"]) == (2, 2)
        assert guard.check() is None


@pytest.mark.parametrize("options", [{"watch": "tripwire"}, {}])
def test_a_model_in_eval_mode_is_judged_with_autograd_too(options):
    net = make_net()
    calls = [net, lambda x: guard.run(lambda: net(x)), lambda x: net[0](x)]
    with OverflowGuard(net, explain=False, **options) as guard:
        for call in calls:
            call(torch.ones(2, 4))
            with pytest.raises(NonFiniteError):
                call(torch.full((2, 4), NAN))
        assert guard.metrics()["requests_total"] == 6


def test_a_training_without_an_optimizer_is_left_to_check():
    net = make_net().train()
    x = torch.full((2, 4), NAN)
    with OverflowGuard(net) as guard:
        for call in (net, lambda x: guard.run(lambda: net(x))):
            call(x).sum().backward()
            report = report_from(guard.check)
            assert report.moment == "check"
            assert report.explanation.cause == "bad data"
            net.zero_grad()


def test_a_step_of_an_optimizer_is_no_request():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with OverflowGuard(net, optimizer, explain=False) as guard:
        with guard.request():
            net(torch.full((2, 4), NAN)).sum().backward()
        report = report_from(optimizer.step)
    assert report.moment == "before"


def test_gradients_within_a_request_are_explained():
    net = nn.Sequential(Forces(lin=nn.Linear(4, 1))).eval()
    with OverflowGuard(net) as guard:
        for call in (net, lambda x: guard.run(lambda: net(x))):
            assert call(torch.ones(2, 4)).isfinite().all()
            found = report_from(lambda c=call: c(torch.zeros(2, 4))).explanation
            assert "sqrt" in str(found.op), found


def test_a_gradient_behind_a_forward_is_of_its_request():
    net, x = make_net(), torch.ones(2, 4, requires_grad=True)
    with OverflowGuard(net) as guard:
        with pytest.raises(NonFiniteError) as raised, guard.request(ids=list("ab")):
            out = net(x)
            torch.autograd.grad((out - out.detach()).sqrt().sum(), x)
        report = raised.value.report
        assert report.verdict.first.kind == "grad_output"
        assert "guard.run(" in report.explanation.notes[0]

        def guided():
            out = net(x)
            return torch.autograd.grad((out - out.detach()).sqrt().sum(), x)

        with pytest.raises(NonFiniteError) as raised:
            guard.run(guided)
        assert "sqrt" in str(raised.value.report.explanation.op)


def test_an_exception_in_a_forward_with_autograd_has_the_report():
    class Refuses(nn.Module):
        def forward(self, x):
            assert x.isfinite().all(), "refused"
            return x

    net = nn.Sequential(nn.Linear(4, 4), Refuses()).eval()
    nn.init.ones_(net[0].weight)
    with OverflowGuard(net) as guard:
        with pytest.raises(AssertionError), guard.request(ids=["a", "b"]):
            net(torch.full((2, 4), 3e38))
        assert guard.last_report.raised == "AssertionError"
        assert guard.last_report.explanation.cause == "range overflow"


@pytest.mark.parametrize(
    "options", [{}, {"watch": "tripwire"}], ids=["all", "tripwire"]
)
def test_a_forward_that_raises_takes_nothing_of_a_request_whose_stats_are_late(
    options, monkeypatch
):
    # As on a device that is busy: nothing has arrived until it is waited for.
    process = StepHooks._process_arrived

    def waited_for(self, max_in_flight):
        if max_in_flight == 0:
            process(self, max_in_flight)

    monkeypatch.setattr(StepHooks, "_process_arrived", waited_for)

    class Raises(nn.Linear):
        error = None

        def forward(self, x):
            if self.error is not None:
                raise self.error
            return super().forward(x)

    net = nn.Sequential(nn.Linear(4, 8), Raises(8, 2)).eval()
    with OverflowGuard(net, explain=False, _defer=True, **options) as guard:
        with pytest.raises(NonFiniteError) as raised:
            ran(net, True)
        late = guard.request(ids=["late"])
        context = contextvars.copy_context()
        context.run(late.__enter__)
        context.run(ran, net, True)
        net[1].error = raised.value  # of another guard's
        with pytest.raises(NonFiniteError) as left:
            ran(net)
        assert left.value is raised.value
        with pytest.raises(NonFiniteError) as ended:
            context.run(late.__exit__, None, None, None)
        assert names(ended.value) == ["late"]
