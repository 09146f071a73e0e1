"""The settings of torch in the process at hand."""

from __future__ import annotations

from typing import Any

import torch


def settings_of_torch() -> dict[str, Any]:
    """The switches of torch that change results or speed, by their names there.

    The older ones of TF32 raise in a program that sets `fp32_precision`, which has the
    value of either.
    """
    backends: Any = torch.backends
    return {
        "cuda.matmul.fp32_precision": backends.cuda.matmul.fp32_precision,
        "cudnn.conv.fp32_precision": backends.cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": backends.cudnn.rnn.fp32_precision,
        "mkldnn.matmul.fp32_precision": backends.mkldnn.matmul.fp32_precision,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()),
    }
