"""The scan alone: which tensors of a model hold nan or inf, and how large others are.

python examples/scan.py

One call reads each tensor once, in every dtype and layout, and waits once for a device.
"""

import torch
from torch import nn

import overflow_fast


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).half()
    model[1].running_var[3] = torch.inf  # as `.half()` makes of a value beyond 65504
    tensors = model.state_dict()
    stats = overflow_fast.scan(list(tensors.values()))
    for name, stat in zip(tensors, stats, strict=True):
        bad = "nan" if stat.has_nan else "inf" if stat.has_inf else ""
        print(f"{name:24} {stat.abs_min:9.3g} {stat.abs_max:9.3g}  {bad}")


if __name__ == "__main__":
    main()
