"""The kinds of effects, in the words of a report: "forward <words>, data.py:31"."""

from __future__ import annotations

import atexit
import inspect
import io
import os
import select
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from .before import Before

QUEUE = "takes from a queue, or writes to it"
LOCK = "waits for a lock that is held"
SIGNALS = "wakes other threads"
WAITS = "waits for another thread"
ITERATOR = "takes from an iterator that was there before"
WRITES = "writes to a file"
TERMINAL = "writes to the terminal by a method that was there before"
READS = "reads from a file that was open before"
SOCKET = "uses a socket"
PROCESS = "starts a process, or waits for one"
THREAD = "starts a thread"
DATABASE = "uses a database"
FILES = "changes files or folders"
ENVIRONMENT = "changes the environment"
SLEEPS = "sleeps"
INPUT = "asks the terminal"
LATE = "took far longer than the step"
PROFILER = "sets a profiler or a tracer"
PROCESS_SIGNAL = "sets or sends a signal"
STORE = "uses the store of the ranks"
SETTINGS = "changes settings of the process"
FOREIGN = "calls a function of the C library"

LOCK_TYPES = (type(threading.Lock()), type(threading.RLock()))
ACQUIRES = ("acquire", "__enter__", "acquire_lock")
RELEASES = ("release", "release_lock")
FILE_WRITES = {"write", "writelines", "truncate", "flush"}
FILE_READS = {
    *("read", "read1", "readall", "readline", "readlines", "readinto", "readinto1"),
    *("peek", "seek", "detach"),
}
# Functions of C that write to a file, or read one, of any module: it is an argument, or
# what a pickler is bound to.
OTHER_WRITES = {"dump", "tofile", "save_file", "serialize_file", "imwrite", "imsave"}
OTHER_READS = {"load", "fromfile"}
WITHIN_PROCESS = (io.StringIO, io.BytesIO)
GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def _functions_of(module: Any, names: str, words: str) -> dict[Any, str]:
    found = (getattr(module, name, None) for name in names.split())
    return {each: words for each in found if each is not None}


# Some functions of `signal` are Python's own, around those of this module.
_SIGNAL = sys.modules["_signal"]
FUNCTIONS = {
    **_functions_of(time, "sleep", SLEEPS),
    **_functions_of(select, "select", WAITS),
    **_functions_of(
        _SIGNAL,
        "alarm setitimer pause sigwait sigwaitinfo sigtimedwait signal raise_signal "
        "pthread_kill pthread_sigmask set_wakeup_fd siginterrupt pidfd_send_signal",
        PROCESS_SIGNAL,
    ),
    **_functions_of(
        os,
        "write writev pwrite pwritev sendfile ftruncate fsync fdatasync sync splice "
        "copy_file_range posix_fallocate eventfd_write",
        WRITES,
    ),
    **_functions_of(os, "read readv pread preadv lseek eventfd_read", READS),
    **_functions_of(os, "pipe pipe2 dup dup2 closerange mkfifo mknod", FILES),
    **_functions_of(
        os,
        "umask nice setpriority sched_setaffinity setsid chroot",
        SETTINGS,
    ),
    **_functions_of(atexit, "register unregister", SETTINGS),
    **_functions_of(sys.modules.get("_locale"), "setlocale", SETTINGS),
    **_functions_of(
        os,
        "fork forkpty kill killpg system wait wait3 wait4 waitpid waitid abort _exit "
        "posix_spawn posix_spawnp execv execve",
        PROCESS,
    ),
    **_functions_of(sys, "setprofile settrace", PROFILER),
    **_functions_of(sys.modules["_thread"], "start_new_thread start_new", THREAD),
}
# Of modules of C: how the methods of their objects are effects, and which of them; all
# but harmless ones where none are named.
METHODS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sqlite3", "_sqlite3"), (DATABASE,)),
    **dict.fromkeys(("_socket", "_ssl"), (SOCKET,)),
    "select": (WAITS, "poll", "control"),
    "_queue": (QUEUE, "get", "put", "get_nowait", "put_nowait"),
    "mmap": (WRITES, "write", "write_byte", "flush", "resize", "move"),
}
HARMLESS_METHODS = ("fileno", "gettimeout", "getsockname", "getpeername")
# Of audit hooks: what the name of an event begins with, the longest first.
EVENTS = {
    "os.putenv": ENVIRONMENT,
    "os.unsetenv": ENVIRONMENT,
    "os.system": PROCESS,
    "os.exec": PROCESS,
    "os.fork": PROCESS,
    "os.posix_spawn": PROCESS,
    "os.kill": PROCESS,
    "subprocess.": PROCESS,
    "os.": FILES,
    "fcntl.": FILES,
    "resource.": SETTINGS,
    "syslog.": WRITES,
    "socket.": SOCKET,
    "sqlite3.": DATABASE,
    "builtins.input": INPUT,
}
# Of these, and of what begins with a name above, the policy is told.
AUDITED = ["open", "mmap.__new__", *EVENTS]
HARMLESS = {
    *("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr"),
    *("os.listxattr", "os.listdrives", "socket.gethostname"),
}
FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


# Functions of Python that are known to be effects. Each says so of its variables.


_T = TypeVar("_T")


class Run(Protocol):
    """A run, as far as a function of Python may have to do with it.

    Attributes:
        before: What was there before.
        on_backward: See `EffectRule.applied()`.
    """

    before: Before
    on_backward: Callable[[Any], object] | None


WordsOf = Callable[[Run, "dict[str, Any]"], str]


def known_codes(table: Mapping[str, _T]) -> dict[types.CodeType, _T]:
    """The code of functions with these paths, of modules that are imported."""
    found = ((_code_of(path), value) for path, value in table.items())
    return {code: value for code, value in found if code is not None}


def _code_of(path: str) -> types.CodeType | None:
    module, _, name = path.partition(":")
    function: Any = sys.modules.get(module)
    for part in name.split("."):
        function = getattr(function, part, None)
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


_FINALIZERS = ("weakref:finalize.__call__", "multiprocessing.util:Finalize.__call__")


def is_finalizer(frame: types.FrameType) -> bool:
    """True for code that the end of an object calls, wherever that happens to be.

    A callback of a weak reference is known by what it is given: that one, whose object
    is gone.
    """
    code = frame.f_code
    if code.co_name == "__del__" or code in map(_code_of, _FINALIZERS):
        return True
    num_given = code.co_argcount + code.co_kwonlyargcount
    num_given += bool(code.co_flags & inspect.CO_VARARGS)
    own = frame.f_locals
    given = [own.get(name) for name in code.co_varnames[:num_given]]
    more = given[-1] if code.co_flags & inspect.CO_VARARGS else ()
    references = [*given, *(more if isinstance(more, tuple) else ())]
    return any(isinstance(e, weakref.ReferenceType) and e() is None for e in references)


def _always(words: str) -> WordsOf:
    return lambda run, own: words


def _of_future(run: Run, own: dict[str, Any]) -> str:
    return "" if own["self"].done() else WAITS


def _of_loader(run: Run, own: dict[str, Any]) -> str:
    return ITERATOR if run.before.has(own["self"]) else ""


def _of_save(run: Run, own: dict[str, Any]) -> str:
    """`torch.save()` opens its file in C++, where nothing of it is seen."""
    return "" if isinstance(own.get("f"), WITHIN_PROCESS) else WRITES


def _of_backward(run: Run, own: dict[str, Any]) -> str:
    """It is of the models; what it adds to other leaves can be put back."""
    if run.on_backward is not None:
        run.on_backward(own["tensors"])
    return ""


KNOWN: dict[str, WordsOf] = {
    **{f"queue:Queue.{n}": _always(QUEUE) for n in ("get", "put", "task_done")},
    "queue:Queue.join": _always(WAITS),
    **{f"multiprocessing.queues:Queue.{n}": _always(QUEUE) for n in ("get", "put")},
    **{
        f"multiprocessing.queues:SimpleQueue.{n}": _always(QUEUE)
        for n in ("get", "put")
    },
    **{
        f"multiprocessing.connection:_ConnectionBase.{n}": _always(SOCKET)
        for n in ("send", "recv", "send_bytes", "recv_bytes", "poll")
    },
    "threading:Event.wait": _always(WAITS),
    "threading:Event.set": _always(SIGNALS),
    "threading:Event.clear": _always(SIGNALS),
    "threading:Condition.wait": _always(WAITS),
    "threading:Condition.notify": _always(SIGNALS),
    "threading:Barrier.wait": _always(WAITS),
    "threading:Semaphore.acquire": _always(WAITS),
    "threading:Semaphore.release": _always(SIGNALS),
    "threading:BoundedSemaphore.release": _always(SIGNALS),
    "threading:Thread.start": _always(THREAD),
    "threading:Thread.join": _always(WAITS),
    "concurrent.futures._base:Future.result": _of_future,
    "concurrent.futures._base:Future.exception": _of_future,
    "concurrent.futures._base:wait": _always(WAITS),
    "concurrent.futures.thread:ThreadPoolExecutor.submit": _always(THREAD),
    "concurrent.futures.process:ProcessPoolExecutor.submit": _always(PROCESS),
    "multiprocessing.process:BaseProcess.start": _always(PROCESS),
    "multiprocessing.process:BaseProcess.join": _always(PROCESS),
    "subprocess:Popen.wait": _always(PROCESS),
    "subprocess:Popen.communicate": _always(PROCESS),
    "asyncio.base_events:BaseEventLoop.run_forever": _always(WAITS),
    "torch.autograd:backward": _of_backward,
    "torch.serialization:save": _of_save,
    "torch.jit._serialization:save": _always(WRITES),
    "torch.export:save": _of_save,
    "safetensors.torch:save_file": _always(WRITES),
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__": _of_loader,
}
