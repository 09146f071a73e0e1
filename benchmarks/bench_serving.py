"""What other requests of a server pay where 1 % are bad: latencies of both."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import fastapi
import httpx
import torch
import uvicorn
from common import progress, write
from timing import QUICK
from torch import nn

import overflow_fast

COLUMNS = [
    *("server", "guard", "bare p50 ms", "p50", "p99", "first block p99", "longest ms"),
    *("bad", "explained", "wrong"),
]
CONNECTIONS, BAD_EVERY, WIDTH, WATCH = 8, 100, 256, "tripwire"
REQUESTS, PAIRS = (200, 2) if QUICK else (400, 5)
NOTES = (
    "FastAPI and uvicorn on one core's worth of torch threads, and a client over HTTP "
    "with 8 connections; 1 % of the requests are bad. A block of requests without a "
    "guard and one with it take turns, in one process. `p50` and `p99` are those of "
    "the innocent requests of guarded blocks, over those of the bare ones: the median "
    "of pairs of blocks. The first guarded block, in which the first bad request is "
    "explained, stands alone; `longest` is its slowest innocent request. `wrong` are "
    "innocent requests with an error, bad ones without, and wrong ids. Without a guard "
    f"the server looks at its outputs itself. {REQUESTS} requests a block, {PAIRS} "
    "pairs of blocks behind the first. `threads`: a "
    "`def` endpoint; `asyncio`: an `async def` one that calls the model itself; "
    "`batches`: a task that puts waiting requests together. Goal: p99 within 1.2."
)


class Block(nn.Module):
    """A feed-forward block; its activation overflows for large inputs in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Six blocks, and a head that takes an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True)
        y: torch.Tensor = self.head(self.blocks(x)) * scale.exp()
        return y


class Server:
    """A model behind HTTP, with or without a guard.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.guard: overflow_fast.OverflowGuard | None = None
        self.reports: list[Any] = []
        self.app = fastapi.FastAPI()
        self.app.get("/threads")(self.in_thread)
        self.app.get("/asyncio")(self.in_loop)
        self.app.get("/batches")(self.in_batch)
        self._waiting: list[tuple[str, float, asyncio.Future[dict[str, Any]]]] = []
        self._batching: asyncio.Task[None] | None = None

    def in_thread(self, name: str, size: float) -> dict[str, Any]:
        return self._answer([name], [size])[name]

    async def in_loop(self, name: str, size: float) -> dict[str, Any]:
        return self._answer([name], [size])[name]

    async def in_batch(self, name: str, size: float) -> dict[str, Any]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((name, size, future))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._batches())
        return await future

    async def _batches(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:CONNECTIONS], []
            names, sizes, futures = zip(*batch, strict=True)
            answers = await asyncio.to_thread(self._answer, names, sizes)
            for name, future in zip(names, futures, strict=True):
                future.set_result(answers[name])

    def _answer(self, names: Any, sizes: Any) -> dict[str, dict[str, Any]]:
        """Runs the model; where a batch is bad, its rows that are not bad again.

        Without a guard the rows are looked at here, as a server without one would.
        """
        x = torch.ones(len(names), 8, WIDTH) * torch.tensor(sizes).view(-1, 1, 1)
        bad, values = self._run(x, names)
        answers: dict[str, dict[str, Any]] = {each: {"bad": bad} for each in bad}
        others = [i for i, name in enumerate(names) if name not in bad]
        if bad and others:
            rest = [names[i] for i in others], [sizes[i] for i in others]
            return answers | self._answer(*rest)
        if bad:
            return answers
        return {n: {"value": v} for n, v in zip(names, values, strict=True)}

    def _run(self, x: torch.Tensor, names: Any) -> tuple[list[str], list[float]]:
        """Runs the model; returns who is bad, or else a value for each."""
        with torch.inference_mode():
            if self.guard is None:
                values = self._model(x).sum((1, 2)).tolist()
                pairs = zip(names, values, strict=True)
                return [name for name, each in pairs if not math.isfinite(each)], values
            try:
                with self.guard.request(ids=list(names)):
                    return [], self._model(x).sum((1, 2)).tolist()
            except overflow_fast.NonFiniteError as error:
                report: Any = error.report
                self.reports.append(report)
                return [str(each) for each in report.requests], []


@contextlib.contextmanager
def serving(server: Server) -> Iterator[str]:
    """Yields the address at which it is served."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    config = uvicorn.Config(server.app, port=port, log_level="error", access_log=False)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.should_exit = True
        thread.join()


async def block(url: str, number: int) -> tuple[list[float], int]:
    """Sends requests, `CONNECTIONS` at a time.

    Returns:
        The seconds of the innocent ones, and how many answers were wrong.
    """
    seconds: list[float] = []
    wrong = 0
    places = iter(range(REQUESTS))

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal wrong
        for i in places:
            name, is_bad = f"{number}-{i}", i % BAD_EVERY == BAD_EVERY // 2
            asked = {"name": name, "size": 100.0 if is_bad else 1.0}
            begin = time.perf_counter()
            answer = (await http.get(url, params=asked)).json()
            if not is_bad:
                seconds.append(time.perf_counter() - begin)
            if answer.get("bad") != ([name] if is_bad else None):
                wrong += 1

    async with httpx.AsyncClient() as http:
        await asyncio.gather(*(client(http) for _ in range(CONNECTIONS)))
    return seconds, wrong


def quantiles(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    found = statistics.quantiles(seconds, n=100)
    return found[49], found[98]


def measure(kind: str) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    model = Model().eval()
    server, ratios, bare_p50, wrong = Server(model), [], [], 0
    with serving(server) as address:
        url = f"{address}/{kind}"
        asyncio.run(block(url, -1))
        guard = overflow_fast.OverflowGuard(model, watch=WATCH)
        guard.disable()
        for pair in range(PAIRS + 1):
            bare, num_wrong = asyncio.run(block(url, pair))
            wrong += num_wrong
            guard.enable()
            server.guard = guard
            guarded, num_wrong = asyncio.run(block(url, pair))
            server.guard = None
            guard.disable()
            wrong += num_wrong
            before, after = quantiles(bare), quantiles(guarded)
            ratios.append((after[0] / before[0], after[1] / before[1]))
            bare_p50.append(before[0])
            if pair == 0:
                longest = max(guarded)
        guard.remove()
    p50, p99 = (statistics.median(each) for each in zip(*ratios[1:], strict=True))
    row: dict[str, Any] = {
        "server": kind,
        "guard": WATCH,
        "bad": len(server.reports),
        "wrong": wrong,
    }
    row |= {"bare p50 ms": round(1e3 * statistics.median(bare_p50), 1)}
    row |= {"p50": f"{p50:.2f}", "p99": f"{p99:.2f}"}
    row |= {"first block p99": f"{ratios[0][1]:.2f}"}
    row |= {"longest ms": round(1e3 * longest)}
    row["explained"] = sum(each.explanation is not None for each in server.reports)
    progress(str(row))
    return row


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rows = [measure(kind) for kind in ("threads", "asyncio", "batches")]
    write("serving", "Serving", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
