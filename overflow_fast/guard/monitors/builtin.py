"""The monitors that come with the package, and those that are on by default."""

from __future__ import annotations

from .layer_audit import LayerAudit
from .magnitudes import Headroom, Saturation, Underflow
from .masked_ops import MaskedOps
from .replicas import Replicas
from .spikes import Spikes

MONITORS = (Spikes, Saturation, Headroom, Underflow, MaskedOps, LayerAudit, Replicas)
DEFAULT_MONITORS = (Spikes(), Saturation())
