import torch

class Readability:
    READABLE: Readability
    UNSUPPORTED: Readability
    FREED: Readability
    INDIRECT: Readability

def scan_one(
    tensor: torch.Tensor, composite: bool = False
) -> tuple[float | None, float | None, int, int] | Readability: ...
def isa() -> str: ...
