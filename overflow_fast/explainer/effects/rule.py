"""Runs code of the program again, and ends it before its first effect.

What a replay runs was handed over to be run, not to write, wait or take anything twice.
So the thread that replays is watched: each function is seen before it runs, and in
place of one that writes to a file or reads one that is open, waits for another thread,
takes from a queue or an iterator that was there before, uses a socket, a database or
the environment, starts a thread or a process, or changes files, `Effect` is raised.

    rule = EffectRule()
    with rule.applied(seconds):
        output = model(batch)  # raises StoppedError in place of an effect

What goes to the terminal and to loggers is dropped meanwhile, in this thread alone.

Not seen, and so not ended: what the program does to its own Python objects outside of
the models (`sys.path`, attributes of classes), what it writes to memory that processes
share or that is mapped from a file, switches that it toggles by assignment
(`torch.backends`), what a function of C does within one call, unless its name says that
it writes to a file, and iteration over a file.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import gc
import io
import itertools
import os
import pickle
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ... import _C
from ...base.source_files import is_of_program, is_of_user, is_own
from ..budget import clock_limit
from ..users_lines import Site
from . import kinds
from .before import Before
from .collectives import collectives
from .lookups import UNSEEN, arguments, looked_at, may_name, places_of
from .quiet import quiet, terminals

# How long a replay may compute: so many times as long as the step took, and some
# seconds for what a replay does besides, such as to look at each operation.
TIMES_THE_STEP = 20.0
LEAST_SECONDS = 3.0
_PATIENCE = 0.1  # seconds for a lock that another thread holds for a moment
_MOST_SWALLOWED = 100  # effects whose exception the program's code has caught


class Effect(BaseException):
    """Raised in place of an effect. No `Exception`: loggers and many a loop swallow it.

    It does not leave `EffectRule.applied()`.
    """


class StoppedError(Exception):
    """A run that was ended before its first effect.

    Args:
        text: What it was and where, as a clause, such as "forward waits for a queue,
            data.py:31".
    """


Meet = Callable[[str, Sequence[int]], str]


class EffectRule:
    """Ends what runs within `applied()` before its first effect.

    What exists when it is made counts as the program's: what is made later, by a run,
    is the run's own, and may be taken from.

    Args:
        held: See `Before`.
        meet: Is called before each collective call with the group's name and ranks;
            what it returns, if that is not "", ends the run, too.
    """

    def __init__(self, held: Iterable[Any] = (), meet: Meet | None = None) -> None:
        self._policy = _Policy(Before(held), meet)
        self._watch = _C.CallWatch(self._policy, kinds.AUDITED)

    @contextlib.contextmanager
    def applied(
        self, seconds: float, on_backward: Callable[[Any], object] | None = None
    ) -> Iterator[None]:
        """Applies it to this thread. Profilers and tracers of others rest meanwhile.

        Args:
            seconds: How long this thread may compute before it is ended, too: what
                else a busy machine does is not counted. What waits is ended later, by
                the clock.
            on_backward: Called before each backward, also those that the program's own
                code calls, with the tensors or edges that it begins at.

        Raises:
            StoppedError: Instead of an effect, also if code within has caught that.
        """
        policy = self._policy
        policy.begin(self._watch, on_backward)
        try:
            # Hooks and functions of autograd run in this thread then, on each device.
            with (
                quiet.applied(),
                torch.autograd.set_multithreading_enabled(False),
                self._finalizers_apart(),
            ):
                self._watch.begin(seconds, clock_limit(seconds))
                try:
                    yield
                finally:
                    self._watch.end()
        except Effect:
            pass
        except (SystemExit, GeneratorExit) as error:
            raise RuntimeError(f"it raised {type(error).__name__}") from None
        finally:
            policy.end()
        if policy.stopped:
            raise StoppedError(policy.stopped) from None

    @contextlib.contextmanager
    def _finalizers_apart(self) -> Iterator[None]:
        """Leaves alone what the garbage collector calls: it is not of the run."""
        own = threading.get_ident()

        def on_collection(phase: str, info: dict[str, int]) -> None:
            if threading.get_ident() == own:
                is_begun = phase == "start"
                self._watch.rest(is_begun)
                quiet.pause(is_begun)

        gc.callbacks.append(on_collection)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # the program has emptied the list
                gc.callbacks.remove(on_collection)


class _Policy:
    """Tells effects from other calls; see `_C.CallWatch`, which asks it.

    Args:
        before: What was there before.
        meet: See `EffectRule`.

    Attributes:
        stopped: The first effect of a run, as a clause, or "".
        on_backward: See `EffectRule.applied()`.
    """

    on_backward: Callable[[Any], object] | None = None

    def __init__(self, before: Before, meet: Meet | None) -> None:
        self._codes = kinds.known_codes(kinds.KNOWN)
        self._meet = meet
        self._collectives = {} if meet is None else kinds.known_codes(collectives())
        self.before = before
        self._own_terminals: dict[int, Any] = {}
        self._watch: _C.CallWatch | None = None
        self._num_stops = 0
        self._taken: list[Any] = []  # locks that a run holds
        self.stopped = ""

    def begin(
        self, watch: _C.CallWatch, on_backward: Callable[[Any], object] | None
    ) -> None:
        """Begins a run."""
        self.on_backward = on_backward
        self._watch, self._num_stops, self.stopped = watch, 0, ""
        self._own_terminals = terminals()
        self.before.note()

    def end(self) -> None:
        """Gives back what the run has taken, and looks at what was not seen."""
        for each in reversed(self._taken):
            with contextlib.suppress(RuntimeError, ValueError):
                each.release()
        self._taken.clear()
        taken = self.before.put_back()
        if taken and not self.stopped:
            self.stopped = f"the code that was run again {kinds.ITERATOR}"
        self._watch = self.on_backward = None

    def asks_about(self, function: Any) -> bool:
        """True for a function of C that may be an effect, of whatever object."""
        return self._way_to_ask(function) is not None

    def on_function(self, frame: types.FrameType, function: Any) -> None:
        """Raises Effect where a function of C is one, called by a frame."""
        words_of = self._way_to_ask(function)
        words = "" if words_of is None else words_of(frame)
        if words:
            self._stop(frame, words)

    def _way_to_ask(self, function: Any) -> Callable[[types.FrameType], str] | None:
        """Returns what tells of a caller's frame which effect it is, or "".

        None for a function that is none, whatever it is called with.
        """
        owner, name = function.__self__, function.__name__
        kind = type(owner)
        if name in kinds.OTHER_WRITES or name in kinds.OTHER_READS:
            way = "write" if name in kinds.OTHER_WRITES else "read"
            if isinstance(owner, (pickle.Pickler, pickle.Unpickler)):
                return lambda frame: self._words_of_files(_files_of(owner), way)
            return lambda frame: self._words_of_given(frame, way)
        if function is builtins.next:
            return self._words_of_next
        if function is print:
            return self._words_of_print
        if (
            isinstance(owner, io.IOBase)
            and name in kinds.FILE_WRITES | kinds.FILE_READS
        ):
            return lambda frame: self._words_of_file(owner, name)
        is_lock = isinstance(owner, kinds.LOCK_TYPES)
        is_lock |= kind.__module__ == "_multiprocessing"
        if is_lock and name in (*kinds.ACQUIRES, *kinds.RELEASES):
            return lambda frame: self._words_of_lock(owner, name, frame)
        if kind in kinds.GENERATORS and name in ("send", "throw", "close"):
            return lambda frame: kinds.ITERATOR if self._was_there(owner) else ""
        if kind.__module__ == "_csv" and name in ("writerow", "writerows"):
            return lambda frame: self._words_of_files(_files_of(owner), "write")
        words = _words_of_each_call(function)
        return (lambda frame: words) if words else None

    def _words_of_file(self, file: Any, name: str) -> str:
        if id(file) in self._own_terminals:
            # `write` of C is one that was kept: no name of the stream drops it.
            return "" if name != "write" or quiet.takes(file) else kinds.TERMINAL
        if isinstance(file, kinds.WITHIN_PROCESS) and not self.before.has(file):
            return ""
        if name in kinds.FILE_WRITES:
            return kinds.WRITES
        return kinds.READS if self.before.has(file) else ""

    def _words_of_next(self, frame: types.FrameType) -> str:
        iterator = [UNSEEN, *arguments(frame)][-1]
        # Libraries number what they make.
        is_number = type(iterator) is itertools.count
        if is_number and not is_of_program(frame.f_code.co_filename):
            return ""
        return kinds.ITERATOR if self._was_there(iterator) else ""

    def _was_there(self, iterator: Any) -> bool:
        """True if it was there before, and is not this package's own."""
        code: Any = getattr(iterator, "gi_code", None)
        is_ours = type(iterator) is types.GeneratorType and is_own(code.co_filename)
        return not is_ours and self.before.has(iterator)

    def _words_of_lock(self, lock: Any, name: str, frame: types.FrameType) -> str:
        if name in kinds.ACQUIRES:
            is_torchs = not is_of_user(frame.f_code.co_filename)
            waits = not (is_torchs or _is_tried(frame))
            if not _is_free(lock, _PATIENCE if waits else 0.0):
                return kinds.LOCK if waits else ""
            if name != "__enter__":
                self._taken.append(lock)
            return ""
        for place, each in enumerate(self._taken):
            if each is lock:
                del self._taken[place]
                return ""
        return kinds.SIGNALS

    def _words_of_given(self, frame: types.FrameType, way: str) -> str:
        """Of a function of C that is given a file, or the path of one."""
        found = [each for each in arguments(frame) if isinstance(each, io.IOBase)]
        if found or way == "read":
            return self._words_of_files(found, way)
        return kinds.WRITES

    def _words_of_files(self, files: Iterable[Any], name: str) -> str:
        words = (self._words_of_file(each, name) for each in files)
        return next(filter(None, words), "")

    def _words_of_print(self, frame: types.FrameType) -> str:
        """`print(..., file=x)` calls x's `write` of C: x has to be seen here."""
        given = arguments(frame) if may_name(frame, "file") else []
        files = [each for each in given if isinstance(each, io.IOBase)]
        if not files and any(each is UNSEEN for each in given):
            return kinds.WRITES
        return self._words_of_files(files, "writelines")

    def asks_at(
        self, code: types.CodeType
    ) -> tuple[bool, bool, tuple[int, ...]] | None:
        """Returns where to ask in a code; None for this package's own.

        Returns:
            Whether to look at the time at each of its lines, since it may loop without
            a call; whether to ask at its call; and before which instructions.
        """
        if is_own(code.co_filename):
            return None
        is_asked = code in self._codes or code in self._collectives
        places = places_of(code)
        return places.may_loop, is_asked, places.unseen

    def on_code(self, frame: types.FrameType) -> None:
        """Raises Effect where a call of Python code is one."""
        code = frame.f_code
        if code in self._collectives and self._meet is not None:
            group = self._collectives[code](frame.f_locals)
            why = "" if group is None else self._meet(*group)
            if why:
                self.stopped = self.stopped or why
                raise Effect(why)
        words_of = self._codes.get(code)
        words = "" if words_of is None else words_of(self, frame.f_locals)
        if words:
            self._stop(frame, words)

    def may_go_on(self, frame: types.FrameType, generator: Any) -> bool:
        """False for a generator, or a coroutine, that was there before.

        Where it goes on unseen, as in `list(generator)`, an exception would end it:
        what it was asked for is given, and nothing after that.
        """
        if not self.before.has(generator):
            return True
        self.stopped = self.stopped or _clause(frame.f_back or frame, kinds.ITERATOR)
        assert self._watch is not None
        self._watch.refuse_all()
        return False

    def on_instruction(self, frame: types.FrameType, returned: Any) -> None:
        """Raises Effect before `with lock:` that would wait, and before `list(items)`.

        Neither calls a function that is seen; calls by ctypes and of Cython do not.

        Args:
            frame: Where it stands.
            returned: What a function of Python has returned last, as in `with f():`.
        """
        values, function = looked_at(frame)
        words = "" if function is UNSEEN else _words_of_opaque(function)
        if words:
            self._stop(frame, words)
        for each in values:
            value = returned if each is UNSEEN else each
            if isinstance(value, kinds.LOCK_TYPES):
                # What torch waits for is held by torch, in another thread.
                is_of_torch = not is_of_user(frame.f_code.co_filename)
                if not (is_of_torch or _is_free(value, _PATIENCE)):
                    self._stop(frame, kinds.LOCK)
            elif each is not UNSEEN and self.before.has(value):
                self._stop(frame, kinds.ITERATOR)

    def on_audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Raises Effect where what an audit hook sees is one."""
        words = next((w for e, w in kinds.EVENTS.items() if event.startswith(e)), "")
        if event == "open":
            words = kinds.WRITES if _opens_for_writing(*args[:3]) else ""
        elif event == "mmap.__new__":
            is_shared = args[2:3] not in ((1,), (3,))  # else it reads, or copies
            words = kinds.WRITES if is_shared else ""
        elif event in kinds.HARMLESS:
            words = ""
        if words:
            self._stop(sys._getframe(1), words)

    def ignores(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Stands where a debugger's function would: nothing calls it meanwhile."""

    def on_over(self, frame: types.FrameType) -> None:
        """Raises Effect: the time is over, or too many effects were swallowed."""
        if not self.before.has(_C.generator_of(frame)):
            self._stop(frame, kinds.LATE)

    def _stop(self, frame: types.FrameType, words: str) -> None:
        """Raises Effect, unless what does it is not the program's step."""
        frames = list(_frames_of_run(frame))
        own = next(filter(_is_programs, frames), None)
        if own is None or any(map(kinds.is_finalizer, frames)):
            return
        if any(map(_is_import, frames[: frames.index(own) + 1])):
            return
        self.stopped = self.stopped or _clause(own, words)
        self._num_stops += 1
        if self._num_stops > _MOST_SWALLOWED and self._watch is not None:
            self._watch.refuse_all()
        raise Effect(self.stopped)


def _words_of_each_call(function: Any) -> str:
    """Of a function of C that is an effect, or none, whatever it is called with."""
    owner, kind = function.__self__, type(function.__self__)
    if owner is None or isinstance(owner, types.ModuleType):
        return kinds.FUNCTIONS.get(function, "")
    if function in _store_functions():
        return kinds.STORE
    module = "_socket" if isinstance(owner, socket.socket) else kind.__module__
    words, *names = kinds.METHODS.get(module, ("",))
    name = function.__name__
    is_one = name in names if names else name not in kinds.HARMLESS_METHODS
    return words if is_one else ""


def _words_of_opaque(function: Any) -> str:
    """Of a function that is called neither as Python's nor as C's."""
    kind = type(function)
    if kind.__mro__[-2].__name__ == "_CData":  # of `ctypes`, whose own has no name
        return kinds.FOREIGN if hasattr(function, "__name__") else ""
    is_of_cython = kind.__name__ == "cython_function_or_method"
    names = kinds.FILE_WRITES | kinds.OTHER_WRITES
    return kinds.WRITES if is_of_cython and function.__name__ in names else ""


def _files_of(owner: Any) -> list[Any]:
    """The files of which an object of C keeps a method, as a pickler does."""
    files = (getattr(each, "__self__", None) for each in gc.get_referents(owner))
    return [each for each in files if isinstance(each, io.IOBase)]


def _frames_of_run(frame: types.FrameType) -> Iterator[types.FrameType]:
    """Yields a frame and those around it, up to this package's own."""
    own: types.FrameType | None = frame
    while own is not None and not is_own(own.f_code.co_filename):
        yield own
        own = own.f_back


def _is_programs(frame: types.FrameType) -> bool:
    return is_of_program(frame.f_code.co_filename)


def _is_import(frame: types.FrameType) -> bool:
    """True for the import of a module, and what stands at its top."""
    files = [frame.f_code.co_filename]
    if frame.f_code.co_name == "<module>" and frame.f_back is not None:
        files.append(frame.f_back.f_code.co_filename)
    return any(each.startswith("<frozen importlib") for each in files)


def _clause(frame: types.FrameType, words: str) -> str:
    """Names the function that is about to do it, and the line, of a file of its own.

    Code made of a string, as a dataclass's `__init__`, has none: its caller is named.
    """
    for each in _frames_of_run(frame):
        is_shown = each is frame or _is_programs(each)
        if is_shown and each.f_code.co_filename != "<string>":
            return f"{each.f_code.co_name} {words}, {Site.of(each).text}"
    return f"{frame.f_code.co_name} {words}"


def _is_tried(frame: types.FrameType) -> bool:
    """True for `lock.acquire(False)` and such, which do not wait."""
    return any(each is False for each in arguments(frame))


def _is_free(lock: Any, seconds: float) -> bool:
    """True for a lock that this thread can take within so many seconds."""
    is_taken = bool(lock.acquire(True, seconds))
    if is_taken:
        lock.release()
    return is_taken


def _opens_for_writing(path: Any, mode: Any = None, flags: Any = 0) -> bool:
    if path == os.devnull:
        return False
    is_written = isinstance(flags, int) and bool(flags & kinds.FOR_WRITING)
    return is_written or (isinstance(mode, str) and bool(set(mode) & set("wax+")))


@functools.cache
def _store_functions() -> set[Any]:
    """The functions of the stores by which ranks find one another."""
    if not torch.distributed.is_available():
        return set()
    store: Any = vars(torch.distributed)["Store"]
    names = ("set", "get", "add", "compare_set", "delete_key", "wait", "append")
    found = (getattr(store, name, None) for name in names)
    return {getattr(each, "__func__", each) for each in found if each is not None}
