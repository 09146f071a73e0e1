"""overflow_fast: the numerics flight recorder that PyTorch users leave on."""

import torch  # (first: the extension needs torch's libraries)

from . import (
    binaries,
    text,  # noqa: F401  (its lines begin with the package's name)
)

try:
    # First: an old build may have left an extension here, for an unknown torch.
    __path__.insert(0, str(binaries.folder_for(torch.__version__)))
    from . import _C  # noqa: F401
except ImportError as error:
    why = binaries.why_not_imported(torch.__version__, error)
    if binaries.is_there(torch.__version__):
        raise ImportError(why) from error
    from . import fallback

    fallback.install(why)

from . import flags, metal
from .capture.coverage import Coverage
from .comparison.comparison import Comparison
from .comparison.entry_points import compare, compare_live, recording, shadow
from .comparison.recordings import RecordingError
from .core.ops import Stat, scan
from .debug import DebugUnderflowOverflow, detect_overflow, get_abs_min_max
from .guard.guard import OverflowGuard
from .guard.monitors.layer_audit import LayerAudit
from .guard.monitors.magnitudes import Headroom, Saturation, Underflow
from .guard.monitors.masked_ops import MaskedOps
from .guard.monitors.monitor import Monitor, MonitoredStep, Notice
from .guard.monitors.replicas import Replicas
from .guard.monitors.spikes import Spikes
from .guard.options import Evidence, Explain, Log, Record, Schedule
from .guard.state_check import assert_finite_state
from .precision.advise import advise_precision
from .precision.keep_in_fp32 import keep_in_fp32
from .precision.precision_advice import PrecisionAdvice
from .record.record_lines import RecordError
from .record.table import FlightRecord, read_record
from .replay.explain import explain
from .replay.explanation import Explanation, Op
from .report.report import GuardCoverage, NonFiniteError, Report

__all__ = [
    "Comparison",
    "Coverage",
    "DebugUnderflowOverflow",
    "Evidence",
    "Explain",
    "Explanation",
    "FlightRecord",
    "GuardCoverage",
    "Headroom",
    "LayerAudit",
    "Log",
    "MaskedOps",
    "Monitor",
    "MonitoredStep",
    "NonFiniteError",
    "Notice",
    "Op",
    "OverflowGuard",
    "PrecisionAdvice",
    "Record",
    "RecordError",
    "RecordingError",
    "Replicas",
    "Report",
    "Saturation",
    "Schedule",
    "Spikes",
    "Stat",
    "Underflow",
    "advise_precision",
    "assert_finite_state",
    "compare",
    "compare_live",
    "detect_overflow",
    "explain",
    "flags",
    "get_abs_min_max",
    "keep_in_fp32",
    "read_record",
    "recording",
    "scan",
    "shadow",
]
__version__ = "1.0.0rc1"

metal.register()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
