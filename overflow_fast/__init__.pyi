# Written by docs/tools/tables.py.
from typing import Final

from . import flags as flags
from .detector.coverage import Coverage as Coverage
from .detector.debug import DebugUnderflowOverflow as DebugUnderflowOverflow
from .detector.debug import detect_overflow as detect_overflow
from .detector.debug import get_abs_min_max as get_abs_min_max
from .explainer.explain import explain as explain
from .explainer.remedies.keep_in_fp32 import keep_in_fp32 as keep_in_fp32
from .guard.guard import OverflowGuard as OverflowGuard
from .guard.monitors.layer_audit import LayerAudit as LayerAudit
from .guard.monitors.magnitudes import Headroom as Headroom
from .guard.monitors.magnitudes import Saturation as Saturation
from .guard.monitors.magnitudes import Underflow as Underflow
from .guard.monitors.monitor import Monitor as Monitor
from .guard.monitors.monitor import MonitoredStep as MonitoredStep
from .guard.monitors.monitor import Notice as Notice
from .guard.monitors.replicas import Replicas as Replicas
from .guard.monitors.spikes import Spikes as Spikes
from .guard.monitors.updates import Updates as Updates
from .guard.options import Evidence as Evidence
from .guard.options import Explain as Explain
from .guard.options import Log as Log
from .guard.options import Record as Record
from .guard.options import Schedule as Schedule
from .guard.record.record_lines import RecordError as RecordError
from .guard.report.coverage import GuardCoverage as GuardCoverage
from .guard.report.explanation import Explanation as Explanation
from .guard.report.op import Op as Op
from .guard.report.report import NonFiniteError as NonFiniteError
from .guard.report.report import Report as Report
from .guard.state_check import assert_finite_state as assert_finite_state
from .scanner.ops import Stat as Stat
from .scanner.ops import scan as scan
from .tools.compare.comparison import Comparison as Comparison
from .tools.compare.entry_points import compare as compare
from .tools.compare.entry_points import compare_live as compare_live
from .tools.compare.entry_points import recording as recording
from .tools.compare.entry_points import shadow as shadow
from .tools.compare.recordings import RecordingError as RecordingError
from .tools.masked_ops import MaskedOps as MaskedOps
from .tools.precision.advise import advise_precision as advise_precision
from .tools.precision.precision_advice import PrecisionAdvice as PrecisionAdvice
from .tools.record.reading import read_record as read_record
from .tools.record.table import FlightRecord as FlightRecord

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
    "Updates",
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
__version__: Final[str]
MONITORS: Final[dict[str, str]]
