"""Fails a test in which a model becomes non-finite: a plugin of pytest.

1. The mark `overflow_guard` guards the models that a test trains, or runs without
   autograd, as `overflow-fast run` guards those of a script. A test in which there was
   nothing to guard gets a warning.
2. The fixture `overflow_guard` makes a guard of a model that a test names. What no
   optimizer's step has judged is judged when the test ends.

pytest imports this file at each start, so it imports nothing else of the package until
a test asks for a guard: a test suite that has no use for it does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ..guard.guard import OverflowGuard

_NAME = "overflow_guard"
_GUARDS = pytest.StashKey[list[tuple[Any, "OverflowGuard"]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark."""
    config.addinivalue_line(
        "markers",
        f"{_NAME}(**arguments): fails a test in which a forward, backward or update "
        "is non-finite, with the report; takes the arguments of OverflowGuard",
    )


@pytest.fixture
def overflow_guard(request: pytest.FixtureRequest) -> Callable[..., OverflowGuard]:
    """Makes guards of models: `overflow_guard(model, optimizer)`.

    It takes the arguments of `OverflowGuard`. A step of the optimizer is judged before
    it is made; all else when the test ends.
    """
    guards = request.node.stash.setdefault(_GUARDS, [])

    def make(model: Any, *args: Any, **kwargs: Any) -> OverflowGuard:
        from ..guard.guard import OverflowGuard

        guard = OverflowGuard(model, *args, **kwargs)
        guards.append((model, guard))  # which holds the model weakly
        return guard

    request.addfinalizer(lambda: [each.remove() for _, each in guards])
    return make


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Runs a test, under a guard of its own if it has the mark."""
    __tracebackhide__ = True
    mark = pyfuncitem.get_closest_marker(_NAME)
    if mark is None:
        result = yield
    else:
        result = yield from _guarded(mark, pyfuncitem)
    for _, guard in pyfuncitem.stash.get(_GUARDS, []):
        _judge(guard)
    return result


def _guarded(mark: pytest.Mark, item: pytest.Item) -> Generator[None, Any, Any]:
    from ..guard.config import GuardConfig
    from .script_guard import ScriptGuard, UnusableArgumentsError

    __tracebackhide__ = True
    if mark.args:
        given = ", ".join(map(repr, mark.args))
        pytest.fail(
            f"the mark {_NAME} must be given arguments of OverflowGuard by name, such "
            f"as watch='tripwire', got {given}",
            pytrace=False,
        )
    try:
        GuardConfig.of_given(mark.kwargs)
    except (TypeError, ValueError, ImportError) as error:
        raise _failure(error) from None
    guard = ScriptGuard(mark.kwargs)
    try:
        with guard.watching():
            result = yield
    except UnusableArgumentsError as error:
        raise _failure(error) from None
    if why := guard.why_nothing_was_guarded():
        text = f"no step was guarded: {why}; the fixture {_NAME} takes any model"
        item.warn(pytest.PytestWarning(text))
    return result


def _failure(error: BaseException) -> BaseException:
    return pytest.fail.Exception(f"the mark {_NAME}: {error}", pytrace=False)


def _judge(guard: OverflowGuard) -> None:
    from ..guard.report.report import NonFiniteError

    __tracebackhide__ = True
    try:
        guard.check()
        return
    except NonFiniteError as error:
        text = str(error.report)  # in full: the test is over, and holds no error
    pytest.fail(text, pytrace=False)
