"""Flight records for pages, made without a guard; and what a page has in it."""

import base64
import html.parser
import json
import sys
import zlib
from pathlib import Path

import torch

from overflow_fast.guard.files.schema import convert
from overflow_fast.guard.record.record_lines import (
    KIND,
    RECORD_SCHEMA,
    EntriesLine,
    FlightRecordLine,
    StepsLine,
)
from overflow_fast.tools.page.render import page_of
from overflow_fast.tools.record.table import FlightRecord

LIMIT = 65504.0
HOSTILE = (
    "</script><script>isBroken = 1</script>",
    "\"quoted\" & 'quoted' `${1}` {{ 7 * 7 }}",
    "emoji 🔥 and 漢字",
    "x" * 300,
    "<img src=x onerror='isBroken = 1'>",
    "lone \ud800 surrogate",
)


def packed(values, dtype):
    flat = values.to(dtype).contiguous()
    return base64.b64encode(flat.numpy().tobytes()).decode() if flat.numel() else ""


def entry(module="h.0", label="output", kind="output", numel=100, dtype="float16"):
    return {
        **{"module": module, "label": label, "kind": kind, "class": "Block"},
        **{"numel": numel, "dtype": dtype, "limit": LIMIT},
    }


def record_of(high, entries=None, nans=None, path="run.ofr", spans=None, **run):
    """A record whose entries have the magnitudes `high`, [steps, entries].

    `nans` are counts of that shape; `spans` the first and last numbers of the steps.
    """
    steps, width = high.shape
    entries = entries or [entry(f"h.{i}") for i in range(width)]
    nans = torch.zeros_like(high) if nans is None else nans
    first = {"kind": KIND, "schema": RECORD_SCHEMA, "byteorder": sys.byteorder}
    lines = [
        {
            **first,
            "run": "a run",
            "rank": 0,
            "world_size": 1,
            **{k: v for k, v in run.items() if k != "counts"},
        }
    ]
    lines.append({"kind": "entries", "model": 0, "first": 0, "entries": entries})
    counted = run.pop("counts", {})
    for i in range(steps):
        begin, end = spans[i] if spans else (i, i)
        columns = {
            "num": width,
            "abs_min": packed(high[i], torch.float32),
            "abs_max": packed(high[i], torch.float32),
            "num_nan": packed(nans[i], torch.int64),
            "num_inf": "",
            **{name: packed(value[i], torch.int64) for name, value in counted.items()},
        }
        lines.append(
            {
                **{"kind": "steps", "level": 0, "first": begin, "last": end},
                **{"count": end - begin + 1, "time": 1e9, "seconds": 0.5},
                **{"guard_seconds": 0.1, "learning_rate": 1e-3, "actions": {}},
                **{"skipped": 0, "models": [columns]},
            }
        )
    kind = FlightRecordLine | EntriesLine | StepsLine
    return FlightRecord(Path(path), [convert(each, kind) for each in lines], False, 0)


class Parsed(html.parser.HTMLParser):
    """A page as a browser without JavaScript has it.

    Attributes:
        text: Its text.
        tables: The cells of its tables, by their captions.
        addresses: What it would load, or leads to.
        payloads: The data that it carries, inflated, by name.
        tags: The names of its elements.
        sections: The text below each heading of the second level.
    """

    def __init__(self, page):
        super().__init__()
        self.text, self.tables, self.addresses, self.payloads = "", {}, [], {}
        self.tags, self.sections = [], {"": ""}
        self._inside, self._caption, self._name = "", "", None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.tags.append(tag)
        self._inside = tag
        self._name = known.get("data-name")
        self.addresses += [known[k] for k in ("src", "href", "action") if k in known]
        if tag == "caption":
            self._caption = ""
        if tag == "tr":
            self.tables.setdefault(self._caption, []).append([])
        if tag in ("td", "th") and self._caption in self.tables:
            self.tables[self._caption][-1].append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._name is not None and self._inside == "script":
            self.payloads[self._name] = zlib.decompress(base64.b64decode(data))
        if self._inside in ("script", "style"):
            return
        self.text += data
        if self._inside == "h2":
            self.sections[data] = ""
        else:
            self.sections[[*self.sections][-1]] += data
        if self._inside == "caption":
            self._caption += data
        elif self._caption in self.tables and self._inside in ("td", "th", "code"):
            self.tables[self._caption][-1][-1] += data

    @property
    def meta(self):
        return json.loads(self.payloads["meta"])

    def table(self, opening):
        """The rows of the one table whose caption begins so, as dicts."""
        (rows,) = [t for c, t in self.tables.items() if c.startswith(opening)]
        return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def parsed(*arguments):
    return Parsed(page_of(*arguments))
