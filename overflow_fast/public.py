"""The public names: importing them loads torch and the extension.

`overflow_fast.__all__` lists them, and says so if one is missing here.
"""

# ruff: noqa: F401

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
from .report.guard_coverage import GuardCoverage
from .report.report import NonFiniteError, Report
