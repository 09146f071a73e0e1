"""One tensor in other layouts, and with non-finite values, against a contiguous one."""

from __future__ import annotations

import torch
from common import Results, progress, require_kernels, size_text
from floor import floor_kind, plain_read
from timing import DEVICE, ON_GPU, QUICK, free_bytes, race, ratio, summary

from overflow_fast import scan

COLUMNS = ["case", "bytes looked at", "GB/s", "scan / plain read of as many bytes"]
NOTES = (
    "float32, all threads. The last column compares with a plain contiguous read of as "
    "many bytes as the tensor has elements for; every second element costs whole cache "
    "lines, so half of that is the most there is."
)


def side() -> int:
    """Rows and columns: 1 GiB on a GPU that has room for it, 64 MiB on the CPU."""
    if QUICK:
        return 512
    return 16384 if ON_GPU and free_bytes() > 2**33 else 4096


def cases() -> dict[str, torch.Tensor]:
    n = side()
    base = torch.rand(n, n, device=DEVICE)
    nan = torch.full((n, n), torch.nan, device=DEVICE)
    one = base.clone()
    one[n // 2, 7] = torch.inf
    return {
        "contiguous": base,
        "transposed": base.t(),
        "from the second element on": base.flatten()[1:],
        "every second row": base[::2],
        "left half of each row": base[:, : n // 2],
        "64 bytes of each row": base[:, :16],
        "every second element": base[:, ::2],
        "expanded 8 times": base.expand(8, n, n),
        "one inf": one,
        "all nan": nan,
    }


def check(tensor: torch.Tensor) -> None:
    """Correctness before speed."""
    low, high = tensor.abs().aminmax()
    stat = scan([tensor])[0]
    found = torch.tensor([stat.abs_min, stat.abs_max])
    expected = torch.stack([low, high]).cpu()
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def main() -> None:
    require_kernels()
    op, read = torch.ops.overflow_fast.scan.default, plain_read()
    results = Results("layouts", "Scan by layout and content", NOTES, COLUMNS)
    results.lacks(floor_kind())
    for name, tensor in cases().items():
        progress(name)
        kept = tensor[0] if name.startswith("expanded") else tensor
        num_bytes = kept.numel() * kept.element_size()
        flat = torch.rand(kept.numel(), device=DEVICE)
        slots = torch.tensor([[-1, 0, 0, 0]], device=DEVICE)
        check(tensor)
        times = race(
            {
                "scan": lambda t=tensor, s=slots: op(s, 0, [t]),
                "plain read": lambda t=flat: read(t),
            }
        )
        spread = summary(times["scan"])
        results.add(
            {
                "case": name,
                "bytes looked at": size_text(num_bytes),
                "GB/s": f"{num_bytes / spread['median'] / 1e9:.3g}",
                COLUMNS[-1]: f"{1 / ratio(times, 'scan', 'plain read'):.2f}",
                "seconds": spread,
            }
        )
    slowest = min(results.rows, key=lambda row: float(row[COLUMNS[-1]]))
    results.headline(f"slowest layout: {slowest['case']}, {slowest['GB/s']} GB/s")
    results.finish()


if __name__ == "__main__":
    main()
