"""One tensor in other layouts, and with non-finite values, against a contiguous one."""

from __future__ import annotations

from typing import Any

import torch
from common import QUICK, plain_read, progress, race, ratio, size_text, summary, write

from overflow_fast import scan

COLUMNS = ["case", "bytes looked at", "GB/s", "scan / plain read of as many bytes"]
NOTES = (
    "float32, all threads. The last column compares with a plain contiguous read of as "
    "many bytes as the tensor has elements for; every second element costs whole cache "
    "lines, so half of that is the most there is."
)


def cases() -> dict[str, torch.Tensor]:
    side = 512 if QUICK else 4096
    base = torch.rand(side, side)
    nan = torch.full((side, side), torch.nan)
    one = base.clone()
    one[side // 2, 7] = torch.inf
    return {
        "contiguous": base,
        "transposed": base.t(),
        "every second row": base[::2],
        "left half of each row": base[:, : side // 2],
        "64 bytes of each row": base[:, :16],
        "every second element": base[:, ::2],
        "expanded 8 times": base.expand(8, side, side),
        "one inf": one,
        "all nan": nan,
    }


def main() -> None:
    op, read = torch.ops.overflow_fast.scan.default, plain_read()
    rows: list[dict[str, Any]] = []
    for name, tensor in cases().items():
        progress(name)
        kept = tensor[0] if name.startswith("expanded") else tensor
        num_bytes = kept.numel() * kept.element_size()
        flat = torch.rand(kept.numel())
        slots = torch.tensor([[-1, 0, 0, 0]])
        low, high = tensor.abs().aminmax()
        stat = scan([tensor])[0]
        assert torch.equal(
            torch.tensor([stat.abs_min, stat.abs_max]).nan_to_num(),
            torch.stack([low, high]).nan_to_num(),
        )
        times = race(
            {
                "scan": lambda t=tensor, s=slots: op(s, 0, [t]),
                "plain read": lambda t=flat: read(t),
            }
        )
        spread = summary(times["scan"])
        rows.append(
            {
                "case": name,
                "bytes looked at": size_text(num_bytes),
                "GB/s": f"{num_bytes / spread['median'] / 1e9:.3g}",
                COLUMNS[-1]: f"{1 / ratio(times, 'scan', 'plain read'):.2f}",
                "seconds": spread,
            }
        )
    write("layouts", "Scan by layout and content", NOTES, rows, COLUMNS)


if __name__ == "__main__":
    main()
