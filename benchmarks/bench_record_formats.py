"""Which format a flight record should have: formats that could hold it, tried."""

from __future__ import annotations

import array
import base64
import importlib
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import bytes_of, progress, write
from timing import QUICK

ENTRIES = 620  # of GPT-2 small
STEPS = 200 if QUICK else 3000
TRIES = 5 if QUICK else 50
COLUMNS = [
    *("format", "needs", "us a step", "slowest ms", "bytes a step"),
    *("opens after SIGKILL", "steps lost", "opens when copied"),
]
NOTES = (
    f"Appends the extremes of {ENTRIES} entries for each step, 2 float32 an entry, "
    f"without fsync. `us a step` is the median of {STEPS} appends, `slowest` the "
    "longest. `opens after SIGKILL`: of writers that were killed at a random moment; "
    "`steps lost`: the most of them, of those that the writer had handed over. `opens "
    "when copied`: of plain copies of the file (as `scp` or a reader on another host "
    "takes them) while it is written to, at full speed."
)
Append = Callable[[int, bytes, bytes], None]


class JsonLines:
    """One JSON object a line, columns in base64."""

    needs = "-"

    def writer(self, path: str) -> Append:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        text = base64.b64encode

        def append(step: int, low: bytes, high: bytes) -> None:
            row = {"step": step, "min": text(low).decode(), "max": text(high).decode()}
            os.write(fd, f"{json.dumps(row)}\n".encode())

        return append

    def count(self, path: str) -> int:
        lines = Path(path).read_bytes().split(b"\n")
        return len([json.loads(line) for line in lines[:-1]])


class Sqlite:
    """A row a step, one transaction each."""

    needs = "-"

    def __init__(self, *pragmas: str) -> None:
        self.pragmas = pragmas

    def writer(self, path: str) -> Append:
        db = sqlite3.connect(path, isolation_level=None)
        for pragma in self.pragmas:
            db.execute(f"PRAGMA {pragma}").fetchall()
        db.execute("CREATE TABLE IF NOT EXISTS steps (step, low BLOB, high BLOB)")
        insert = "INSERT INTO steps VALUES (?, ?, ?)"
        return lambda *row: db.execute(insert, row) and None

    def count(self, path: str) -> int:
        db = sqlite3.connect(path)
        try:
            (state,) = db.execute("PRAGMA integrity_check").fetchone()
            if state != "ok":
                raise ValueError(state)
            return int(db.execute("SELECT count(*) FROM steps").fetchone()[0])
        finally:
            db.close()


class ArrowStream:
    """A record batch a step."""

    needs = "pyarrow"

    def writer(self, path: str) -> Append:
        import pyarrow as pa

        blob = pa.binary()
        schema = pa.schema([("step", pa.int64()), ("min", blob), ("max", blob)])
        stream = pa.ipc.new_stream(pa.OSFile(path, "wb"), schema)

        def append(step: int, low: bytes, high: bytes) -> None:
            columns = [pa.array([step]), pa.array([low]), pa.array([high])]
            stream.write_batch(pa.record_batch(columns, schema))

        return append

    def count(self, path: str) -> int:
        import pyarrow as pa

        reader, found = pa.ipc.open_stream(pa.OSFile(path, "rb")), 0
        while True:
            try:
                reader.read_next_batch()
            except (StopIteration, OSError, pa.ArrowInvalid):
                return found
            found += 1


class Hdf5:
    """A resizable data set, flushed each step."""

    needs = "h5py"

    def writer(self, path: str) -> Append:
        import h5py
        import numpy as np

        file = h5py.File(path, "w", libver="latest")
        shape = {"shape": (0, 2, ENTRIES), "maxshape": (None, 2, ENTRIES)}
        steps = file.create_dataset(
            "steps", dtype="f4", chunks=(1, 2, ENTRIES), **shape
        )

        def append(step: int, low: bytes, high: bytes) -> None:
            steps.resize(step + 1, axis=0)
            steps[step] = np.frombuffer(low + high, "f4").reshape(2, ENTRIES)
            file.flush()

        return append

    def count(self, path: str) -> int:
        import h5py

        with h5py.File(path, "r") as file:
            return len(file["steps"][:])


FORMATS: dict[str, Any] = {
    "JSON Lines": JsonLines(),
    "SQLite, journal": Sqlite(
        "journal_mode=PERSIST", "synchronous=OFF", "locking_mode=EXCLUSIVE"
    ),
    "SQLite, WAL without shared memory": Sqlite(
        "locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"
    ),
    "Arrow IPC stream": ArrowStream(),
    "HDF5": Hdf5(),
}


def columns() -> tuple[bytes, bytes]:
    values = array.array("f", [random.random() for _ in range(2 * ENTRIES)])
    return values[:ENTRIES].tobytes(), values[ENTRIES:].tobytes()


def cost(kind: Any, folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "cost")
    append, (low, high), times = kind.writer(path), columns(), []
    for step in range(STEPS):
        begin = time.perf_counter()
        append(step, low, high)
        times.append(time.perf_counter() - begin)
    size = bytes_of(Path(folder).glob("cost*"))
    return {
        "us a step": f"{statistics.median(times) * 1e6:.0f}",
        "slowest ms": f"{max(times) * 1e3:.1f}",
        "bytes a step": round(size / STEPS),
    }


def start(kind: Any, path: str) -> tuple[int, int]:
    """Starts a process that appends; returns it and a pipe of a byte a step."""
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        append, (low, high) = kind.writer(path), columns()
        step = 0
        while True:
            append(step, low, high)
            os.write(write_end, b".")
            step += 1
    os.close(write_end)
    return pid, read


def stop(pid: int, read: int) -> int:
    """Kills a writer; returns how many steps it had appended."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = 0
    while data := os.read(read, 2**16):
        found += len(data)
    os.close(read)
    return found


def survival(kind: Any, folder: str) -> dict[str, Any]:
    opened, lost, copied = 0, 0, 0
    for i in range(TRIES):
        path, copy = (os.path.join(folder, f"{name}{i}") for name in ("kill", "copy"))
        pid, read = start(kind, path)
        os.read(read, 1)
        time.sleep(random.uniform(0.005, 0.03))
        shutil.copyfile(path, copy)
        appended = 1 + stop(pid, read)
        try:
            kind.count(copy)
            copied += 1
        except Exception as error:
            progress(f"copied: {error}")
        try:
            lost = max(lost, appended - kind.count(path))
            opened += 1
        except Exception as error:
            progress(f"killed: {error}")
    return {
        "opens after SIGKILL": f"{opened} of {TRIES}",
        "steps lost": lost if opened else "",
        "opens when copied": f"{copied} of {TRIES}",
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, kind in FORMATS.items():
        progress(name)
        row = {"format": name, "needs": kind.needs}
        rows.append(row)
        try:
            if kind.needs != "-":
                importlib.import_module(kind.needs)
        except ImportError:
            row["us a step"] = "not installed"
            continue
        with tempfile.TemporaryDirectory() as folder:
            row |= cost(kind, folder) | survival(kind, folder)
    write("record-formats", "Formats for a flight record", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
