"""Runs of training engines with a planted fault: what each rank saw, and what is wrong.

`run()` starts a script such as deepspeed_run.py, which trains one small model for each
case in one process a rank: importing an engine takes longer than a case. `problems()`
compares a guarded run with runs that have no guard.
"""

import dataclasses
import faulthandler
import hashlib
import itertools
import json
import logging
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

BAD, STEPS, MICRO = 3, 6, 2
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SUPPORT = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        layout: A stage of ZeRO, behind the trainer's name where one uses DeepSpeed, or
            how Megatron or torchtitan shares the model.
        dtype: bf16, fp16 or fp32.
        fault: In step BAD of the last rank: an input, an overflow within a layer, a nan
            in backward alone. "none" plants nothing; "search" has a loss scale that is
            too large, "persistent" a nan in backward from step BAD on, "generation" a
            nan in a forward without autograd that a trainer samples from; "left out"
            leaves the step out.
        policy: The guard's; "none" for no guard.
        watch: The guard's.
    """

    layout: str
    dtype: str
    fault: str = "none"
    policy: str = "skip"
    watch: str = "all"

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self)).replace(" ", "_")

    @property
    def plants(self) -> bool:
        return self.fault in ("input", "overflow", "backward")

    def bare(self, fault: str) -> "Case":
        """The run of the same model without a guard."""
        return Case(self.layout, self.dtype, fault, "none")


@dataclasses.dataclass
class Training:
    """A model under an engine.

    Attributes:
        model: The user's.
        make_guard: Makes the guard.
        step: Makes a step of a number, with a fault or "", and returns its losses.
        state: Lists all tensors and values that a skipped step must not change.
        facts: What the engine counts: `engine_skipped` and `global_steps`.
        first_step: The number that the engine gives its first step.
    """

    model: torch.nn.Module
    make_guard: Callable[..., Any]
    step: Callable[[int, str], list[float]]
    state: Callable[[], list[Any]]
    facts: Callable[[], dict[str, Any]]
    first_step: int = 0

    def train(
        self, case: Case, losses: list[float], after_step: Callable[[], None]
    ) -> None:
        """Makes the steps of a case on this rank, and notes their losses."""
        for number in range(STEPS):
            if number != BAD or case.fault != "left out":
                losses += self.step(number, fault_of(case, number, dist.get_rank()))
            after_step()


def fault_of(case: Case, number: int, rank: int) -> str:
    """The fault in a step of a rank, or ""."""
    is_bad = number == BAD or (number > BAD and case.fault == "persistent")
    return case.fault if is_bad and rank == dist.get_world_size() - 1 else ""


class Broken(torch.autograd.Function):
    """A nan in backward alone, where a factor is not 1."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (factor,) = ctx.saved_tensors
        return gradient * torch.where(factor == 1, 1.0, float("nan")), None


def faulty(x: torch.Tensor, mark: torch.Tensor, fault: str) -> torch.Tensor:
    """Plants a case's fault in a layer, where a batch has a mark.

    Args:
        x: Activations.
        mark: 1, or much more in a bad batch, or nan.
        fault: The case's.
    """
    if fault in ("input", "generation"):
        return x * mark
    if fault == "overflow":
        return x * (1 + (mark - 1) * (torch.finfo(x.dtype).max / 4))
    if fault in ("backward", "persistent"):
        return Broken.apply(x, mark)
    return x


def cases_of(layout: str, dtype: str, *, searches: bool = True) -> list[Case]:
    """The guarded runs of a layout of an engine.

    Args:
        layout: The layout.
        dtype: The dtype.
        searches: With fp16, the engine scales its loss.
    """
    cases = [Case(layout, dtype), Case(layout, dtype, "none", "raise", "tripwire")]
    faults = ["input", "overflow", "backward"]
    if dtype == "fp16":
        faults.remove("backward")  # under a dynamic scale that is the scale's to find
        cases.append(Case(layout, dtype, "persistent", "raise"))
        if searches:
            cases += [
                Case(layout, dtype, "search"),
                Case(layout, dtype, "search", "skip", "tripwire"),
            ]
    for fault in faults:
        cases += [
            Case(layout, dtype, fault),
            Case(layout, dtype, fault, "raise"),
            Case(layout, dtype, fault, "skip", "tripwire"),
        ]
    return cases


# ZeRO's stages; in fp32 stage 0 steps torch's optimizer. "fp32 sums" is BF16_Optimizer.
# In stage 0 DeepSpeed 0.19.8 does not scale the loss of fp16, so nothing makes its
# scale search.
DEEPSPEED = [
    *cases_of("0", "fp32"),
    *(case for stage in "0123" for case in cases_of(stage, "bf16")),
    *cases_of("1 fp32 sums", "bf16"),
    *(
        case
        for stage in "0123"
        for case in cases_of(stage, "fp16", searches=stage != "0")
    ),
]


# Trainers that use DeepSpeed.
TRAINERS = [
    case
    for trainer in ("Trainer", "Accelerate")
    for stage, dtype in (("0", "fp32"), ("1", "bf16"), ("3", "bf16"), ("2", "fp16"))
    for case in cases_of(f"{trainer} {stage}", dtype)
]


def trl(world: int) -> list[Case]:
    """TRL's trainers.

    A rank that raises while it generates ends, and the launcher ends the others, which
    wait for it: only one rank is left to be looked at.
    """
    cases = [
        case
        for kind, dtype in (("SFT", "fp32"), ("DPO", "bf16"), ("GRPO", "fp32"))
        for case in cases_of(kind, dtype)
    ]
    generation = Case("GRPO", "fp32", "generation", "raise")
    return [*cases, generation] if world == 1 else cases


def megatron(world: int) -> list[Case]:
    """Megatron's layouts that fit a number of ranks; the rest is data parallel."""
    layouts = ["DDP", "distributed optimizer"]
    layouts += ["TP2", "PP2"] if world > 1 else []
    layouts += ["TP2 PP2"] if world > 2 else []
    return [
        case
        for layout in layouts
        for dtype in ("bf16", "fp16")
        for case in cases_of(layout, dtype)
    ]


def torchtitan(world: int) -> list[Case]:
    """torchtitan's layouts that fit a number of ranks; it has no fp16."""
    layouts = {
        1: [("FSDP2", "fp32"), ("FSDP2", "bf16")],
        2: [("FSDP2", "fp32"), ("FSDP2", "bf16"), ("TP2", "bf16")],
        4: [(each, "bf16") for each in ("FSDP2", "HSDP", "FSDP2 TP2")],
    }
    return [case for layout in layouts[world] for case in cases_of(*layout)]


# The cases of each engine, by how many ranks run them.
ENGINES: dict[str, Callable[[int], list[Case]]] = {
    "deepspeed": lambda world: DEEPSPEED,
    "trainers": lambda world: TRAINERS,
    "trl": trl,
    "megatron": megatron,
    "torchtitan": torchtitan,
}


# On each rank.


def play_all(make: Callable[[Case], Training]) -> None:
    """Plays the cases of a file, and writes what this rank saw of each.

    Args:
        make: Makes the training of a case; the same seed on all ranks.
    """
    folder = Path(sys.argv[1])
    for number, values in json.loads((folder / "cases.json").read_text()):
        faulthandler.dump_traceback_later(300, exit=True)
        case, rank = Case(**values), dist.get_rank()
        torch.manual_seed(0)
        try:
            found = play(case, make(case))
        except Exception:
            (folder / "error").write_text(traceback.format_exc())
            raise
        part = folder / f"part.{rank}"
        part.write_text(json.dumps(found))
        part.rename(folder / f"{number}.{rank}.json")
        dist.barrier()
    faulthandler.cancel_dump_traceback_later()


def play(case: Case, training: Training) -> dict[str, Any]:
    """Trains, and returns what this rank saw."""
    from overflow_fast import NonFiniteError

    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger("overflow_fast").addHandler(handler)
    guard = report = raised = None
    if case.policy != "none":
        options = {} if case.watch == "all" else {"watch": case.watch}
        guard = training.make_guard(on_overflow=case.policy, **options)
    digests, losses = [_digest(training.state())], []

    def after_step():
        digests.append(_digest(training.state()))

    try:
        training.train(case, losses, after_step)
    except NonFiniteError as error:
        raised, report = len(digests) - 1, error.report
        after_step()
    if guard is not None:
        guard = getattr(guard, "guard", guard)  # a trainer's callback makes it
        report = report or guard.last_report
        guard.remove()
    logging.getLogger("overflow_fast").removeHandler(handler)
    return {
        "moved": [a != b for a, b in itertools.pairwise(digests)],
        "digests": digests,
        "losses": losses,
        "raised": raised,
        "step": None if report is None else report.step - training.first_step,
        "fqn": None if report is None else report.verdict.first.fqn,
        "where": None if report is None else report.where,
        "text": "" if report is None else " ".join(str(report).split()),
        "skipped": guard.num_skipped if guard else 0,
        "guard_step": guard.step if guard else None,
        "warnings": messages,
        "modules": ["", *(name for name, _ in training.model.named_modules())],
        "names": [name for name, _ in training.model.named_parameters()],
        "bad_rank": f"rank {dist.get_world_size() - 1} of {dist.get_world_size()}",
        **training.facts(),
    }


def _digest(state: list[Any]) -> str:
    digest = hashlib.md5()
    for each in state:
        if isinstance(each, torch.Tensor):
            digest.update(
                each.detach()
                .cpu()
                .contiguous()
                .flatten()
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        else:
            digest.update(repr(each).encode())
    return digest.hexdigest()


# Where the ranks are started.


Seen = list[dict[str, Any]]  # of each rank


def run(engine: str, world: int, cases: list[Case]) -> dict[Case, Seen | str]:
    """Plays cases on some ranks; the words of the failure for one that has no end."""
    results: dict[Case, Seen | str] = {}
    while left := [case for case in cases if case not in results]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            numbered = [(i, dataclasses.asdict(case)) for i, case in enumerate(left)]
            (folder / "cases.json").write_text(json.dumps(numbered))
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*launcher, f"--nproc-per-node={world}"]
            command += [str(SUPPORT / f"{engine}_run.py"), name]
            done = subprocess.run(command, capture_output=True, text=True)
            for i, case in enumerate(left):
                files = [folder / f"{i}.{rank}.json" for rank in range(world)]
                if not all(each.exists() for each in files):
                    error = folder / "error"
                    said = error.read_text() if error.exists() else done.stderr
                    results[case] = f"no end: {said[-3000:]}"
                    break
                results[case] = [json.loads(each.read_text()) for each in files]
    return results


def with_bare(cases: list[Case]) -> list[Case]:
    """The cases, and before each the runs without a guard that it is compared with.

    They are beside one another: on four ranks DeepSpeed's stage 2 has other
    last bits in a process in which stage 3 has run.
    """
    runs = [run for case in cases for run in (*_compared(case).values(), case)]
    return list(dict.fromkeys(runs))


def _compared(case: Case) -> dict[str, Case]:
    if case.plants:
        return {"left out": case.bare("left out")}
    is_alone = case.fault in ("persistent", "generation")
    return {} if is_alone else {"same": case.bare(case.fault)}


def problems(case: Case, results: dict[Case, Seen | str]) -> list[str]:
    """Lists what is wrong with a guarded run.

    Args:
        case: The run.
        results: Those of `run()`.
    """
    compared = {key: results[each] for key, each in _compared(case).items()}
    ended = results[case]
    for each in (ended, *compared.values()):
        if isinstance(each, str):
            return [each]
    assert not isinstance(ended, str)
    wrong: list[str] = []

    def expect(what: str, found: object, expected: object) -> None:
        if found != expected:
            wrong.append(f"rank {rank}: {what} is {found!r}, not {expected!r}")

    for rank, seen in enumerate(ended):
        if case.fault == "persistent":  # an alarm once the scale is down
            expect("state moved in the last step", seen["moved"][-1], False)
            expect("step", seen["step"], seen["raised"])
            expect("raised", seen["raised"], ended[0]["raised"])
            expect("a later step", (seen["raised"] or 0) > BAD, True)
        elif case.fault == "generation":  # before torch.multinomial's own error
            expect("step", (seen["step"], seen["raised"]), (BAD, BAD))
            expect("a name of the model", seen["fqn"] in seen["modules"], True)
        elif not case.plants:
            for key in ("digests", "losses", "engine_skipped", "global_steps"):
                expect(key, seen[key], compared["same"][rank][key])
            expect("step of a report", seen["step"], None)
            expect("log", seen["warnings"], [])
            expect("search", seen["engine_skipped"] > 0, case.fault == "search")
        else:
            _compare_bad(case, rank, ended, compared["left out"][rank], expect)
    return wrong


def _compare_bad(case, rank, ended, left_out, expect):
    seen, world = ended[rank], len(ended)
    expect("step", seen["step"], BAD)
    expect("step of the loop", seen["raised"], BAD if case.policy == "raise" else None)
    expect("skipped", seen["skipped"], int(case.policy == "skip"))
    expect("the state", seen["digests"], left_out["digests"][: len(seen["digests"])])
    expect("the report", seen["text"], ended[0]["text"])
    names = seen["modules"]
    if case.watch == "tripwire":
        names = [*names, *seen["names"], "loss"]
    expect("a name of the model", seen["fqn"] if seen["fqn"] not in names else "", "")
    # Reduced gradients are non-finite on each rank.
    is_reduced = case.watch == "tripwire" and case.fault == "backward"
    if world > 1 and not is_reduced:
        expect("the place", str(seen["where"]).partition(" (")[0], seen["bad_rank"])
    text, says_why = seen["text"], "was not replayed" in seen["text"]
    is_explained = "cause " in text and "cause unknown" not in text
    if case.watch == "all":
        expect("an explanation, or why there is none", is_explained or says_why, True)
        if case.fault != "backward":
            expect("an explanation", is_explained, True)
