"""The demo: a run turns nan under a guard; a T5 overflows, as two detectors report."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import resources
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from tqdm import tqdm
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from transformers.debug_utils import DebugUnderflowOverflow as Original

from ...detector.debug import DebugUnderflowOverflow
from ...guard.guard import OverflowGuard
from ...guard.report.report import NonFiniteError
from ...precision.keep_in_fp32 import keep_in_fp32

# A small training run that turns nan, under a guard.


_STEPS = 3  # two that are clean, and the bad one


class Block(nn.Module):
    """A feed-forward block whose square overflows float16 for a large sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the block's result to its input."""
        hidden = self.up(x).relu().square()
        result: torch.Tensor = x + self.down(hidden)
        return result


def train(page: str | os.PathLike[str]) -> NonFiniteError | None:
    """Trains in float16 until a sample overflows, and writes the page of the run.

    Args:
        page: The file of the page.

    Returns:
        The error that the guard has raised, or None.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), Block(32), nn.LayerNorm(32)).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with (
            tempfile.TemporaryDirectory() as folder,
            OverflowGuard(model, optimizer, record=f"{folder}/run.ofr") as guard,
        ):
            found = _loop(guard, model, optimizer)
            guard.to_html(page)
    return found


def _loop(
    guard: OverflowGuard, model: nn.Module, optimizer: torch.optim.Optimizer
) -> NonFiniteError | None:
    for step in range(_STEPS):
        x = torch.randn(4, 8, dtype=torch.float16)
        if step == _STEPS - 1:
            x[1] *= 900  # a sample far beyond the others
        loss = guard.run(lambda x=x: model(x).float().square().mean())  # type: ignore[misc]
        loss.backward()
        try:
            optimizer.step()
        except NonFiniteError as error:
            return error
        finally:
            optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    return None


# The model that overflows: a T5 of mt5-small's shape, fed real text, byte by byte.


class DemoSettings(NamedTuple):
    """The arguments of the demo."""

    dtype: str = "float16"
    batch_size: int = 4
    length: int = 128
    rounds: int = 7
    seed: int = 0
    tiny: bool = False

    @property
    def limit(self) -> float:
        """The largest finite number of the dtype."""
        return torch.finfo(getattr(torch, self.dtype)).max


def build(settings: DemoSettings) -> nn.Module:
    """Makes the model, with drawn weights, ready to train."""
    shape: dict[str, Any] = {
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 1024,
        "num_layers": 8,
        "num_decoder_layers": 8,
        "num_heads": 6,
    }
    if settings.tiny:
        shape |= {"d_model": 32, "d_kv": 8, "d_ff": 64}
        shape |= {"num_layers": 2, "num_decoder_layers": 1, "num_heads": 2}
    config = T5Config(  # type: ignore[call-arg]
        vocab_size=len(ByT5Tokenizer()),
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        **shape,
    )
    torch.manual_seed(settings.seed)
    model: nn.Module = T5ForConditionalGeneration(config)
    with torch.no_grad():  # logits of a size that a loss in float16 has room for
        model.get_parameter("lm_head.weight").mul_(config.d_model**-0.5)
    return model.to(getattr(torch, settings.dtype)).train()


def read_batch(settings: DemoSettings) -> dict[str, torch.Tensor]:
    """Reads article 1 of the Universal Declaration of Human Rights, a language a row.

    Returns:
        int64 tensors of shape [batch_size, length].
    """
    text = resources.files(__package__).joinpath("humanity.txt").read_text("utf-8")
    lines = text.splitlines()
    chosen = [lines[i % len(lines)] for i in range(settings.batch_size)]
    batch = ByT5Tokenizer()(
        chosen,
        max_length=settings.length,
        truncation=True,
        padding="max_length",
        return_tensors="pt",
    )
    return {**batch, "labels": batch["input_ids"]}


def forward(model: nn.Module, batch: dict[str, torch.Tensor], seed: int) -> float:
    """Runs one training forward, the same one for the same seed; returns its loss."""
    torch.manual_seed(seed)
    loss: torch.Tensor = model(**batch).loss
    return loss.item()


def push_to_the_limit(
    model: nn.Module, batch: dict[str, torch.Tensor], settings: DemoSettings
) -> str:
    """Scales one feed-forward weight so that its output nearly fills the dtype.

    As in transformers' documentation of a real mt5: the output of `wo` still fits,
    and the dropout behind it, which divides what it keeps by 0.9, makes the inf. The
    scale comes from a forward with the same seed, so with the same dropout.

    Returns:
        The name of the layer that was changed.
    """
    outputs: dict[str, float] = {}  # of wo, by the name of its encoder layer
    kept: dict[str, float] = {}  # of the dropout behind it, in parts of that

    def see(name: str, part: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def see_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            largest = output.detach().abs().max().item()
            if part == "dropout":
                kept[name] = largest / outputs[name]
            else:
                outputs[name] = largest

        return see_output

    handles = [
        model.get_submodule(f"{name}.{part}").register_forward_hook(see(name, part))
        for name, _ in model.named_modules()
        if name.startswith("encoder.") and name.endswith(".layer.1")
        for part in ("DenseReluDense.wo", "dropout")
    ]
    forward(model, batch, settings.seed)
    for handle in handles:
        handle.remove()
    late = list(kept)[len(kept) // 2 :]
    chosen = max(late, key=lambda name: kept[name])
    weight = model.get_parameter(f"{chosen}.DenseReluDense.wo.weight")
    with torch.no_grad():
        weight.mul_(0.99 * settings.limit / outputs[chosen])
    return f"{chosen}.DenseReluDense.wo"


# Both detectors on that model, and what they cost.


Batch = dict[str, torch.Tensor]


class DetectorOutput(NamedTuple):
    """The output of a detector for a forward."""

    report: str
    error: str | None


def _watch(
    detector: type[Any], run: Callable[[], object], model: nn.Module
) -> DetectorOutput:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        detector(model)
        try:
            run()
        except ValueError as error:
            return DetectorOutput(out.getvalue(), str(error))
    return DetectorOutput(out.getvalue(), None)


def _time_each(settings: DemoSettings, batch: Batch) -> dict[str, list[float]]:
    """Measures a clean forward of each, in turn, in seconds."""
    models = {name: build(settings) for name in ("bare", "transformers", "ours")}
    Original(models["transformers"])  # type: ignore[no-untyped-call]
    DebugUnderflowOverflow(models["ours"])
    times: dict[str, list[float]] = {name: [] for name in models}
    rounds = tqdm(
        range(-1, settings.rounds), desc="clean forwards", leave=False, disable=None
    )
    for index in rounds:
        for name, model in models.items():
            begin = time.perf_counter()
            forward(model, batch, settings.seed)
            if index >= 0:  # the first of each warms up
                times[name].append(time.perf_counter() - begin)
    return times


def _table(times: dict[str, list[float]]) -> str:
    rows = ["forward, no overflow         median    over bare"]
    labels = {
        "bare": "without detection",
        "transformers": "transformers' detector",
        "ours": "overflow_fast",
    }
    added = {k: statistics.median(v) for k, v in times.items()}
    for name, label in labels.items():
        ratio = added[name] / added["bare"]
        rows.append(f"{label:26} {added[name] * 1e3:6.1f} ms    {ratio:7.2f}x")
    original = added["transformers"] - added["bare"]
    ours = added["ours"] - added["bare"]
    if ours > 0:
        rows.append(f"time added by detection: {original / ours:.1f} times less")
    else:
        rows.append("time added by overflow_fast: less than the rounds vary by")
    return "\n".join(rows)


def _compare(original: DetectorOutput, ours: DetectorOutput) -> str | None:
    """Returns the difference of two outputs as a diff; None if there is none."""
    if original == ours:
        return None
    theirs = f"{original.report}\n{original.error}".splitlines()
    mine = f"{ours.report}\n{ours.error}".splitlines()
    lines = difflib.unified_diff(theirs, mine, "transformers", "ours", lineterm="")
    return "\n".join(lines)


def _overflow(
    detector: type[Any], settings: DemoSettings, batch: Batch
) -> DetectorOutput:
    model = build(settings)
    push_to_the_limit(model, batch, settings)
    return _watch(detector, lambda: forward(model, batch, settings.seed), model)


def _remedied(settings: DemoSettings, batch: Batch) -> DetectorOutput:
    """Runs the same forward with the encoder in float32, up to its last layer norm."""
    model = build(settings)
    push_to_the_limit(model, batch, settings)
    keep_in_fp32(model, ["encoder"])
    run = functools.partial(forward, model, batch, settings.seed)
    return _watch(DebugUnderflowOverflow, run, model)


def show(settings: DemoSettings) -> int:
    """Runs the demo, prints what it finds and returns the exit status.

    Returns:
        0 if both detectors found the overflow and reported the same, and in float16 the
        remedy helped, else 1.
    """
    print(
        "A T5 that overflows, as two detectors report it (a minute or two):", flush=True
    )
    batch = read_batch(settings)
    model = build(settings)
    print(_about(model, settings))
    print(
        "Timing clean forwards, without detection and with each detector ...",
        flush=True,
    )
    times = _time_each(settings, batch)
    layer = push_to_the_limit(model, batch, settings)
    loss = forward(model, batch, settings.seed)
    print(
        f"\n{layer}.weight is scaled until its output nearly reaches "
        f"{settings.limit:.4g}.\nWithout detection the forward ends with loss "
        f"{loss:.4g} and no message. With detection:",
        flush=True,
    )
    original = _overflow(Original, settings, batch)
    ours = _overflow(DebugUnderflowOverflow, settings, batch)
    print(f"{ours.report}\nValueError: {ours.error}\n")
    status = _judge(original, ours)
    if settings.dtype == "float16":
        print("Running the forward again with the remedy ...", flush=True)
        is_finite = _remedied(settings, batch).error is None
        print(
            'After `overflow_fast.keep_in_fp32(model, ["encoder"])` the same forward '
            f"{'is finite' if is_finite else 'still overflows'}."
        )
        status = status if is_finite else 1
    print(f"\n{_table(times)}")
    return status


def _about(model: nn.Module, settings: DemoSettings) -> str:
    num_modules = sum(1 for _ in model.modules())
    num_bytes = sum(p.nbytes for p in model.parameters())
    return (
        f"A T5 {'(tiny)' if settings.tiny else 'of the shape of mt5-small'}: "
        f"{num_modules} modules, {num_bytes / 2**20:.0f} MiB of {settings.dtype}, "
        f"{settings.batch_size} x {settings.length} bytes of text, training mode; "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def _judge(original: DetectorOutput, ours: DetectorOutput) -> int:
    difference = _compare(original, ours)
    if difference is not None:
        print(f"The reports differ:\n{difference}")
        return 1
    if ours.error is None:
        print("Neither detector found an overflow.")
        return 1
    print("transformers' detector printed and raised the same, byte for byte.")
    return 0
