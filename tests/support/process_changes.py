"""A program that looks at what is changed in its process, in each phase of a guard.

Run with the name of a scenario as its second argument, it prints JSON: of each phase,
what the table in docs/limits.md says has begun and not ended, and what was found to be
changed.
"""

import atexit
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import types

import torch
from torch import nn

HOOKS_BEFORE = "hooks are put on, before `torch._dynamo` is imported"
HOOKS = "hooks are put on, and `torch._dynamo` is imported"
PUT_ON = "hooks are put on"
GUARD = "a guard is made"
TRIPWIRE = 'a guard with `watch="tripwire"` is made'
TRACED = "a graph with hooks is traced by AOTAutograd"
OWN = "code with hooks is traced"
REPLAY = "a bad step is run again"  # for moments only: see test_stopping.py

PYTHON = ("sys", "os", "warnings", "gc", "logging", "signal", "builtins", "atexit")
# What Python or torch count and fill by themselves, whoever runs.
COUNTED = {
    *("path_importer_cache", "modules", "counters", "compilation_time_metrics"),
    *("FRAME_COMPILE_COUNTER", "call_function_handler_cache", "cache_bypasses"),
}
# What dynamo itself replaces while it compiles.
OF_DYNAMO = {
    "torch._dynamo.utils.dict_keys_getitem",
    "torch.cuda.set_rng_state",
    "torch.fx._symbolic_trace._assert_is_none",
    "torch.fx.graph_module._forward_from_src",
    "torch.nn.modules.module.Module.__call__",
    "torch.nn.modules.module.Module.__getattr__",
    # Of Python's `catch_warnings`, for as long as it is entered.
    "warnings.showwarning",
}


def is_own(value):
    return "overflow_fast" in repr(value) or id(value) in own_ids()


def own_ids():
    modules = [m for n, m in sys.modules.items() if n.startswith("overflow_fast")]
    return {id(value) for module in modules for value in vars(module).values()}


def content_of(value):
    return tuple(map(id, value)) if isinstance(value, list) else len(value)


def items_of(value):
    return list(value.items()) if isinstance(value, dict) else list(value)


class Look:
    """Everything in torch and in some modules of Python, as it is now."""

    def __init__(self):
        self.places, self.containers, self.noise = [], [], set()
        for name, module in list(sys.modules.items()):
            is_module = isinstance(module, types.ModuleType)
            if is_module and (name.split(".")[0] == "torch" or name in PYTHON):
                self._add(name, vars(module))
        self.values = self._values()

    def _add(self, name, own):
        for key, value in list(own.items()):
            place = f"{name}.{key}"
            if callable(value) or isinstance(value, property):
                self.places.append((place, own, key, value))
            elif isinstance(value, (dict, list, set)) and key not in COUNTED:
                known = content_of(value), items_of(value)
                self.containers.append((place, value, *known))
            is_class = isinstance(value, type) and value.__module__ == name
            if is_class and value.__name__ == key:  # else it is another name of it
                self._add(place, vars(value))

    @staticmethod
    def _values():
        found = {
            "os.environ": dict(os.environ),
            "gc.isenabled": (gc.isenabled(), gc.get_threshold()),
            "signal.getsignal": [signal.getsignal(s) for s in signal.valid_signals()],
            "atexit.register": atexit._ncallbacks(),
            "logging.root": (logging.root.level, logging.root.handlers[:]),
            "torch.is_grad_enabled": torch.is_grad_enabled(),
            "torch.get_default_dtype": torch.get_default_dtype(),
            "torch.get_num_threads": torch.get_num_threads(),
            "torch.is_autocast_enabled": torch.is_autocast_enabled("cpu"),
            "torch.is_autocast_cache_enabled": torch.is_autocast_cache_enabled(),
        }
        if "torch._dynamo" in sys.modules:
            dynamo = sys.modules["torch._dynamo"]
            config = dynamo.config._config
            found |= {
                "torch._dynamo.config": {k: v.default for k, v in config.items()},
                "torch._dynamo.eval_frame._stance": str(dynamo.eval_frame._stance),
                "torch._dynamo.trace_rules": len(
                    dynamo.trace_rules._allowed_callable_ids.function_ids
                ),
            }
        return found

    def changed(self):
        """The names of what is another now."""
        found = {name for name, own, k, v in self.places if own.get(k) is not v}
        found |= {
            name for name, v, known, _ in self.containers if content_of(v) != known
        }
        now = self._values()
        found |= {name for name, value in self.values.items() if now[name] != value}
        return found - self.noise - OF_DYNAMO

    def split(self, names):
        """Those with entries of others, and those with new entries of ours alone."""
        own = set()
        for name, value, _, items in self.containers:
            if name in names:
                known = set(map(id, items)) if not isinstance(value, dict) else {}
                keys = {id(key) for key, _ in items} if not known and items else known
                new = [
                    each
                    for each in items_of(value)
                    if id(each[0] if isinstance(value, dict) else each) not in keys
                ]
                if new and len(value) == len(items) + len(new):
                    own |= {name} if all(map(is_own, new)) else set()
        if "torch._dynamo.trace_rules" in names:
            ids = sys.modules["torch._dynamo"].trace_rules._allowed_callable_ids
            new = ids.function_ids - self.allowed
            own |= {"torch._dynamo.trace_rules"} if new <= own_ids() else set()
        return sorted(names - own), sorted(own)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(self.a(x).relu()) + x.mean(1, keepdim=True).log()


GOOD, BAD = torch.ones(2, 4), -torch.ones(2, 4)
phases = {}


def all_of(begun):
    return [*begun, *[PUT_ON] * bool({HOOKS, HOOKS_BEFORE}.intersection(begun))]


def show(name, *begun):
    """Notes what is changed in a phase."""
    gc.collect()
    phases[name] = [all_of(begun), *look.split(look.changed())]


@contextlib.contextmanager
def shown_to_a_thread(name, *begun):
    """Notes what another thread finds to be changed at any moment."""
    found, is_over, has_begun = set(), threading.Event(), threading.Event()

    def watch():
        while not is_over.is_set():
            found.update(look.changed())
            has_begun.set()

    thread = threading.Thread(target=watch)
    thread.start()
    has_begun.wait(60)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    phases[name] = [all_of(begun), *look.split(found)]


def step(guard, call, optimizer, x):
    guard.run(lambda: call(x).sum()).backward()
    if optimizer is None:
        guard.check()
    else:
        optimizer.step()
        optimizer.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def warm_up(compiles):
    """Does what makes torch import, and fill, what is not there yet."""
    model = Net()
    (output,) = [model(GOOD).sum()]
    torch.autograd.backward([output], [torch.ones(())])
    with contextlib.suppress(RuntimeError):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if compiles is not None:
        optimizer = sgd(model)
        optimizer.step()
        for backend in ("eager", "aot_eager") if compiles else ():
            torch.compile(Net(), backend=backend)(GOOD).sum().backward()


def guards(has_optimizer, hooks, **arguments):
    """The life of guards: one, several, in threads, with errors, dropped."""
    begun = [hooks, GUARD]
    if arguments.get("watch") == "tripwire":
        begun.append(TRIPWIRE)

    def made(policy="skip"):
        model = Net()
        optimizer = sgd(model) if has_optimizer else None
        return model, optimizer, of.OverflowGuard(model, optimizer, policy, **arguments)

    show("imported")
    model, optimizer, guard = made()
    show("made", *begun)
    with shown_to_a_thread("clean steps", *begun):
        for _ in range(3):
            step(guard, model, optimizer, GOOD)
    with shown_to_a_thread("a bad step", *begun):
        step(guard, model, optimizer, BAD)
    show("after a bad step", *begun)

    others = []
    thread = threading.Thread(target=lambda: others.extend([made(), made("raise")]))
    thread.start()
    thread.join()
    guard.remove()
    show("others of another thread are left", *begun)
    others[0][-1].remove()
    with shown_to_a_thread("a step that raises", *begun):
        try:
            step(others[1][-1], *others[1][:2], BAD)
        except of.NonFiniteError:
            pass
        else:
            raise AssertionError("it did not raise")
    others[1][-1].remove()
    show("removed")

    model, optimizer, guard = made()
    guard.disable()
    show("disabled")
    guard.enable()
    show("enabled", *begun)
    del model, optimizer, guard
    others.clear()
    show("dropped")


def detector():
    model, other = Net(), Net()
    found = of.DebugUnderflowOverflow(model)
    show("a detector", HOOKS)
    with contextlib.suppress(ValueError):
        model(BAD)
    show("it has raised", HOOKS)
    of.DebugUnderflowOverflow(other)
    found.remove()
    show("another is left", HOOKS)
    del other
    show("dropped")


def compiled():
    guard = None
    for is_guarded in (False, True):  # the first for what any compilation changes
        model = Net()
        optimizer = sgd(model)
        if is_guarded:
            look.noise |= set().union(
                *(other + own for _, other, own in phases.values())
            )
            phases.clear()
            guard = of.OverflowGuard(model, optimizer, "skip")
        compile_in_all_ways(model, optimizer, guard)
    guard.remove()
    show("removed", OWN)


def compile_in_all_ways(model, optimizer, guard):
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph, inputs):
        with shown_to_a_thread("compiling", HOOKS, GUARD, TRACED, OWN):
            return aot_eager(graph, inputs)

    def failing(graph, inputs):
        aot_eager(graph, inputs)
        raise KeyError("a backend that fails")

    call = torch.compile(model, backend=backend)
    run = guard.run if guard is not None else lambda function: function()
    run(lambda: call(GOOD).sum()).backward()
    optimizer.step()
    show("compiled", HOOKS, GUARD, OWN)
    with torch.no_grad():
        call(GOOD)
    show("compiled without backward", HOOKS, GUARD, OWN)
    for mode in (torch.enable_grad, torch.no_grad):
        try:
            with mode():
                torch.compile(Net() if guard is None else model, backend=failing)(GOOD)
        except Exception as error:
            assert "a backend that fails" in str(error)
        else:
            raise AssertionError("it did not fail")
    torch.compile(Net(), backend="aot_eager")(GOOD).sum().backward()
    show("compiled after an error", HOOKS, GUARD, OWN)
    if guard is not None:
        guard.discard()  # what has failed is no part of the next step
    with shown_to_a_thread("a bad step", HOOKS, GUARD, OWN):
        run(lambda: call(BAD).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


SCENARIOS = {
    "without dynamo": (None, lambda: guards(False, HOOKS_BEFORE)),
    "training": (False, lambda: guards(True, HOOKS)),
    "tripwire": (False, lambda: guards(True, HOOKS, watch="tripwire")),
    "masked": (
        False,
        lambda: guards(
            True, HOOKS, explain=False, monitors=[of.monitors.MaskedOps(every=1)]
        ),
    ),
    "detector": (False, detector),
    "compiled": (True, compiled),
}


if __name__ == "__main__":
    compiles, scenario = SCENARIOS[sys.argv[2]]
    warm_up(compiles)
    gc.collect()
    gc.freeze()
    look = Look()
    look.allowed = set()
    if compiles:
        rules = sys.modules["torch._dynamo"].trace_rules
        look.allowed = set(rules._allowed_callable_ids.function_ids)
    import overflow_fast as of

    logging.getLogger("overflow_fast").setLevel(logging.CRITICAL)
    scenario()
    print(json.dumps(phases))
