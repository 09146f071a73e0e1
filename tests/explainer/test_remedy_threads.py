"""An edited line runs in the replay that tries it, and in no other thread."""

import gc
import os
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from interruptions import interrupted
from remedied_files import Holder, explained, module_of
from torch.utils.checkpoint import checkpoint

from overflow_fast import explain
from overflow_fast.explainer.remedies import line_edit
from overflow_fast.explainer.remedies.line_edit import (
    CodePlace,
    NotEditableError,
    edited_code,
    functions_are_found_once,
    marked,
)

# Each has `log(x)`, which a second thread calls with 0, and `loss_of(x, w)`.
KINDS = {
    "function": """
def log(x):
    return torch.log(x)
""",
    "method": """
class Logs:
    def log(self, x):
        return torch.log(x)
log = Logs().log
""",
    "closure": """
def make(eps):
    def log(x):
        return torch.log(x + eps)
    return log
log = make(0.0)
""",
    "nested": """
def log(x):
    def inner(y):
        return torch.log(y)
    return inner(x)
""",
    "static": """
class Logs:
    @staticmethod
    def log(x):
        return torch.log(x)
log = Logs.log
""",
    "property": """
class Value:
    def __init__(self, x):
        self.x = x
    @property
    def log(self):
        return torch.log(self.x)
def log(x):
    return Value(x).log
""",
    "lambda": """
log = lambda x: torch.log(x)
""",
    "generator": """
def values(x):
    yield x
    yield torch.log(x)
def log(x):
    return list(values(x))[1]
""",
    "wrapped": """
def plain(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)
    return wrapper
@plain
def log(x):
    return torch.log(x)
""",
    "comprehension": """
def log(x):
    return [torch.log(each) for each in [x]][0]
""",
    "global": '''
num_calls = 0
def log(x):
    """Counts its calls."""
    global num_calls
    num_calls += 1
    return torch.log(x)
''',
    "recursion": """
def log(x, depth=3):
    if depth:
        return log(x, depth - 1)
    return torch.log(x)
""",
    "coroutine": """
async def later(x):
    return torch.log(x)
def log(x):
    try:
        later(x).send(None)
    except StopIteration as end:
        return end.value
""",
    "statement": """
def log(x):
    y = x + 1.0
    y /= x
    return -y
""",
}
SOURCE = """import functools
import torch
{}
def pause():
    pass
def loss_of(x, w):
    pause()
    return log(x * w).mean()
"""


def codes_of(module):
    """The code of each function of a module, by its identity."""
    functions = [
        each
        for each in gc.get_objects()
        if type(each) is types.FunctionType
        and each.__code__.co_filename == module.__file__
    ]
    return {id(each): each.__code__ for each in functions}


class Hammer:
    """Threads that call a function with 0, and keep what is not -inf."""

    def __init__(self, function, num_threads=2):
        self.function, self.wrong, self.num_calls = function, [], 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]

    def __enter__(self):
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self._end.set()
        for thread in self._threads:
            thread.join()
        sys.setswitchinterval(self._before)

    def wait(self):
        """Waits until each thread has made a call of its own from now on."""
        enough = self.num_calls + 2 * len(self._threads)
        end = time.monotonic() + 30
        while self.num_calls < enough and time.monotonic() < end:
            time.sleep(1e-4)

    def _run(self):
        zeros = torch.zeros(2)
        while not self._end.is_set():
            try:
                found = self.function(zeros)
                if not bool((found == -torch.inf).all()):
                    self.wrong.append(found)
            except Exception as error:
                self.wrong.append(error)
            self.num_calls += 1
            time.sleep(1e-5)  # the replay waits for the interpreter, else


def assert_all_is_put_back(module, before):
    after = codes_of(module)
    assert all(after[each] is code for each, code in before.items() if each in after)
    assert not line_edit._swaps


@pytest.mark.parametrize("name", KINDS)
def test_another_thread_runs_its_own_line(name, tmp_path):
    module, _ = module_of(tmp_path, SOURCE.format(KINDS[name]))
    before, zeros, seen = codes_of(module), torch.zeros(2), []
    module.pause = lambda: seen.append(in_thread(lambda: module.log(zeros)))
    found = explained(module.loss_of, torch.zeros(3, 2))
    assert [each.is_recommended for each in found.remedies][:1] == [True], found
    assert len(seen) == found.replays > 2
    assert all(bool((each == -torch.inf).all()) for each in seen)
    assert_all_is_put_back(module, before)


@pytest.mark.parametrize("name", ["function", "nested", "generator", "recursion"])
def test_other_threads_run_their_own_line_at_any_moment(name, tmp_path):
    """Also while code is exchanged, and in calls that are under way then."""
    module, _ = module_of(tmp_path, SOURCE.format(KINDS[name]))
    before = codes_of(module)
    with Hammer(module.log) as hammer:
        module.pause = hammer.wait  # the replay goes on when others have called it
        found = explained(module.loss_of, torch.zeros(3, 2))
    assert [each.is_recommended for each in found.remedies][:1] == [True], found
    assert hammer.num_calls > 4 and hammer.wrong == []
    assert_all_is_put_back(module, before)


def edit_of(module, path, old="torch.log(x)", new="torch.log(x.clamp(min=1e-8))"):
    """An edit of a function `log`: its place, and the text to run."""
    text = path.read_text()
    assert text.count(old) == 1
    place = CodePlace.of(module.log.__code__)
    return (place,), text.replace(old, marked(f"({new})", 0))


@pytest.fixture
def logs(tmp_path):
    """A module with a function `log`, and an edit of it."""
    module, path = module_of(tmp_path, SOURCE.format(KINDS["function"]))
    return module, edit_of(module, path)


def in_thread(function):
    """The result of a function in another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_only_the_thread_of_the_replay_runs_it(logs):
    module, edit = logs
    code, zero = module.log.__code__, torch.zeros(())
    with edited_code(*edit):
        assert module.log(zero).isfinite()
        assert in_thread(lambda: module.log(zero)).isinf()
        assert module.log(zero).isfinite()
    assert module.log.__code__ is code and module.log(zero).isinf()


def test_code_that_did_not_run_was_not_tried(logs):
    module, edit = logs
    code = module.log.__code__
    with pytest.raises(NotEditableError, match="did not run the changed code"):
        with edited_code(*edit):
            in_thread(lambda: module.log(torch.zeros(())))
    assert module.log.__code__ is code


@pytest.mark.parametrize(
    "imports",
    [
        "import torch\n",
        "from __future__ import annotations\nimport torch\n",
        "try:\n    import torch\nexcept ImportError:\n    pass\n",
    ],
    ids=["plain", "future", "nested"],
)
def test_functions_of_other_threads_keep_their_code(tmp_path, imports):
    """Also those that a function makes while it is edited."""
    text = "def make():\n    def log(x: int):\n        return torch.log(x)\n"
    module, path = module_of(tmp_path, f"{imports}{text}    return log\n")
    inner = module.make().__code__
    place = CodePlace.of(inner)
    edit = path.read_text().replace(
        "torch.log(x)", marked("(torch.log(x.clamp(min=1e-8)))", 0)
    )
    zero = torch.zeros(())
    with edited_code((place,), edit):
        others = in_thread(module.make)
        assert others.__code__ is inner
        own = module.make()
        assert own(zero).isfinite() and own.__code__ is not inner
        assert in_thread(lambda: own(zero)).isinf()
    assert own.__code__ is inner and own(zero).isinf()


def test_other_threads_see_their_own_frames(tmp_path):
    """What inspects itself finds the same caller, line and names as ever."""
    text = """import sys, torch
def log(x):
    frame = sys._getframe()
    names = sorted(frame.f_locals)
    seen.append((frame.f_lineno, frame.f_back.f_code.co_name, names, log.__name__))
    return torch.log(x)
seen = []
"""
    module, path = module_of(tmp_path, text)

    def caller():
        return module.log(torch.zeros(()))

    in_thread(caller)
    with edited_code(*edit_of(module, path)):
        in_thread(caller)
        caller()
    assert module.seen[0] == module.seen[1] == module.seen[2]


def test_errors_have_the_lines_of_the_file(tmp_path):
    text = "import torch\ndef log(x):\n    y = 1 // len(x)\n    return torch.log(x)\n"
    module, path = module_of(tmp_path, text)

    def line():
        try:
            module.log(torch.zeros(0))
        except ZeroDivisionError as error:
            return error.__traceback__.tb_next.tb_lineno

    with edited_code(*edit_of(module, path)):
        assert in_thread(line) == line() == 3
        module.log(torch.zeros(1))


def test_a_call_that_runs_already_goes_on_as_it_was(tmp_path):
    text = """import torch
def log(x, wait=lambda: None):
    wait()
    return torch.log(x)
def loss_of(x, w):
    return log(x * w).mean()
"""
    module, _ = module_of(tmp_path, text)
    begun, end, found = threading.Event(), threading.Event(), []
    wait = lambda: (begun.set(), end.wait(30))  # noqa: E731
    thread = threading.Thread(
        target=lambda: found.append(module.log(torch.zeros(2), wait))
    )
    thread.start()
    begun.wait(30)
    explanation = explained(module.loss_of, torch.zeros(3, 2))
    end.set()
    thread.join()
    assert explanation.remedies[0].is_recommended
    assert (found[0] == -torch.inf).all()


@pytest.mark.parametrize("name", ["function", "method", "generator", "recursion"])
def test_an_explanation_looks_for_functions_once(name, tmp_path, monkeypatch):
    """However many replays it edits: that reads all objects of the program."""
    looks, edits = [], []

    def referrers(*objects):
        looks.append(objects)
        return gc.get_referrers(*objects)

    def begin(*args):
        edits.append(args)
        return own_begin(*args)

    own_begin = line_edit._begin
    monkeypatch.setattr(line_edit, "_begin", begin)
    monkeypatch.setattr(line_edit, "gc", types.SimpleNamespace(get_referrers=referrers))
    module, _ = module_of(tmp_path, SOURCE.format(KINDS[name]))
    x = torch.ones(3, 2)
    x[1] = 0
    found = explained(module.loss_of, x)
    assert found.remedies[0].moved is not None  # the others ran with it, too
    assert len(edits) > 1 and len(looks) == 1


def test_a_function_that_was_made_since_is_edited(logs):
    module, edit = logs
    zero, path = torch.zeros(()), module.__file__
    with functions_are_found_once():
        with edited_code(*edit):
            assert module.log(zero).isfinite()
        exec(compile(Path(path).read_text(), path, "exec"), vars(module))
        with edited_code(*edit):
            assert module.log(zero).isfinite()
    assert module.log(zero).isinf()


def test_a_function_that_a_replay_leaves_is_edited_in_the_next(tmp_path):
    text = """import torch
known = []
def make():
    def log(x):
        return torch.log(x)
    return log
def log(x):
    known[:] = known or [make()]
    return known[0](x)
"""
    module, path = module_of(tmp_path, text)
    place, zero = CodePlace.of(module.make().__code__), torch.zeros(())
    new = marked("(torch.log(x.clamp(min=1e-8)))", 0)
    edit = path.read_text().replace("torch.log(x)", new)
    with functions_are_found_once():
        for _ in range(3):
            with edited_code((place,), edit):
                assert module.log(zero).isfinite()
            assert module.log(zero).isinf()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_an_exception_leaves_nothing(logs, error):
    module, edit = logs
    code = module.log.__code__
    with pytest.raises(error), edited_code(*edit):
        raise error
    assert module.log.__code__ is code and not line_edit._swaps
    assert in_thread(lambda: module.log(torch.zeros(()))).isinf()


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_an_interruption_at_any_moment_leaves_nothing(logs):
    module, edit = logs
    code, zero, num_interrupted = module.log.__code__, torch.zeros(()), 0

    def edit_and_run():
        for _ in range(100):
            with edited_code(*edit):
                module.log(zero)

    for came in interrupted(edit_and_run, [1e-4 + i * 4e-4 for i in range(40)]):
        num_interrupted += came
        assert module.log.__code__ is code and not line_edit._swaps
    assert num_interrupted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("is_own_thread", [True, False])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_process_forked_in_a_trial_has_its_own_code(logs, is_own_thread):
    module, edit = logs
    code = module.log.__code__

    def fork():
        child = os.fork()
        if child == 0:
            os._exit(0 if module.log.__code__ is code else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    with edited_code(*edit):
        assert (fork() if is_own_thread else in_thread(fork)) == 0
        assert module.log(torch.zeros(())).isfinite()


def test_two_replays_at_once(logs):
    """The same edit is shared; another one of the same code is not tried."""
    module, (places, text) = logs
    zero, code = torch.zeros(()), module.log.__code__
    other = text.replace("1e-8", "1e-4")

    def same():
        with edited_code(places, text):
            return module.log(zero)

    def different():
        try:
            with edited_code(places, other):
                return module.log(zero)
        except NotEditableError as error:
            return str(error)

    with edited_code(places, text):
        mine = module.log(zero)
        assert torch.equal(in_thread(same), mine)
        assert in_thread(different) == "another replay edits that code now"
        assert torch.equal(module.log(zero), mine)
    assert module.log.__code__ is code and not line_edit._swaps
    assert in_thread(different).isfinite()


def test_two_explanations_in_two_threads(tmp_path):
    found = {}

    def explain_one(number):
        module, _ = module_of(tmp_path, SOURCE.format(KINDS["function"]))
        found[number] = explained(module.loss_of, torch.zeros(3, 2))

    threads = [threading.Thread(target=explain_one, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(each.remedies[0].is_recommended for each in found.values())


# What a replay runs, and what it does not.


class Custom(torch.autograd.Function):
    """The logarithm, whose backward runs a function."""

    @staticmethod
    def forward(ctx, x, derivative):
        ctx.save_for_backward(x)
        ctx.derivative = derivative
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.derivative(*ctx.saved_tensors), None


def deep(function, depth):
    """The function within checkpoints, whose backward changes threads."""
    if depth == 0:
        return function
    return lambda x: checkpoint(deep(function, depth - 1), x, use_reentrant=True)


@pytest.mark.parametrize("depth", [0, 1, 70])
def test_backward_runs_it_in_whichever_thread(depth, tmp_path):
    module, path = module_of(tmp_path, SOURCE.format(KINDS["function"]))
    x, threads = torch.zeros(2, requires_grad=True), set()

    def derivative(x):
        threads.add(threading.get_ident())
        return module.log(x)

    with edited_code(*edit_of(module, path)):
        deep(lambda x: Custom.apply(x, derivative), depth)(x).sum().backward()
    assert x.grad.isfinite().all()
    assert (threads == {threading.get_ident()}) is (depth < 60)


def test_a_thread_that_the_forward_starts_belongs_to_the_program(tmp_path):
    text = SOURCE.format(KINDS["function"]).replace(
        "return log(x * w).mean()",
        "with ThreadPoolExecutor(1) as pool:\n"
        "        return pool.submit(log, x * w).result().mean()",
    )
    text = "from concurrent.futures import ThreadPoolExecutor\n" + text
    module, _ = module_of(tmp_path, text)
    found = explained(module.loss_of, torch.zeros(3, 2))
    assert not any(each.tried for each in found.remedies), found
    assert "did not help" not in str(found)


NOT_REACHED = """import functools, torch
@functools.lru_cache(None)
def log(key):
    return torch.log(torch.zeros(2))
def loss_of(x, w):
    return (log(0) * w * x).mean()
"""


def test_a_line_that_a_cache_stands_for_is_not_tried(tmp_path):
    module, _ = module_of(tmp_path, NOT_REACHED)
    model = Holder()
    found = explain(model, torch.ones(2), lambda x: module.loss_of(x, model.w))
    assert "did not help" not in str(found), found
    assert not any(each.is_recommended for each in found.remedies)


CHANGES_ITS_WAY = """import torch
num_calls = [0]
def log(x):
    num_calls[0] += 1
    if num_calls[0] <= {}:
        return torch.log(x)
    return x / 0.0
def loss_of(x, w):
    return log(x * w).mean()
"""


def test_a_line_that_the_replay_does_not_reach_is_not_tried(tmp_path):
    module, _ = module_of(tmp_path, CHANGES_ITS_WAY.format(2))
    found = explained(module.loss_of, torch.ones(3, 2) * 0)
    assert module.num_calls[0] > 2
    assert "did not help" not in str(found), found
    assert any("did not run the changed code" in each for each in found.notes)


def test_a_call_of_c_that_calls_it(tmp_path):
    """`map` calls the function itself, which is edited."""
    text = SOURCE.format(KINDS["function"]).replace(
        "log(x * w).mean()",
        "sum(map(log, [x * w] * 2)).mean()",
    )
    module, _ = module_of(tmp_path, text)
    assert explained(module.loss_of, torch.zeros(3, 2)).remedies[0].is_recommended


def test_a_form_that_does_not_fit_the_line_is_not_listed(tmp_path):
    """Its replay raises: that says nothing about the step."""
    text = SOURCE.format(KINDS["function"]).replace(
        "import torch\n", "import torch as t\n"
    )
    module, _ = module_of(tmp_path, text.replace("torch.log(x)", "1.0 / x"))
    found = explained(module.loss_of, torch.zeros(3, 2))
    assert all(each.tried for each in found.remedies), found
    assert "torch.where" not in str(found) and "raised" not in str(found)


def test_nothing_else_of_a_function_is_touched(logs):
    """A function's defaults, globals and attributes are not touched."""
    module, edit = logs
    before = {k: v for k, v in vars(module).items()}
    defaults, attributes = module.log.__defaults__, dict(vars(module.log))
    with edited_code(*edit):
        assert vars(module).keys() == before.keys()
        assert module.log is before["log"]
        module.log(torch.ones(1))
    assert module.log.__defaults__ is defaults and vars(module.log) == attributes


def test_what_other_threads_are_making_is_left_alone(logs):
    """A tuple of a generator cannot be made while something else refers to it."""
    module, edit = logs
    errors, end = [], threading.Event()

    def numbers():
        for i in range(30):
            time.sleep(0)
            yield i

    def make():
        while not end.is_set():
            try:
                tuple(numbers())
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            with edited_code(*edit):
                module.log(torch.zeros(()))
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert errors == []
