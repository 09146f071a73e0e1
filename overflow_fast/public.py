"""The public names: importing them loads torch and the extension.

`overflow_fast.__all__` lists them. `as` tells type checkers that each is handed on.
"""

from .capture.coverage import Coverage as Coverage
from .comparison.comparison import Comparison as Comparison
from .comparison.entry_points import compare as compare
from .comparison.entry_points import compare_live as compare_live
from .comparison.entry_points import recording as recording
from .comparison.entry_points import shadow as shadow
from .comparison.recordings import RecordingError as RecordingError
from .core.ops import Stat as Stat
from .core.ops import scan as scan
from .debug import DebugUnderflowOverflow as DebugUnderflowOverflow
from .debug import detect_overflow as detect_overflow
from .debug import get_abs_min_max as get_abs_min_max
from .guard.guard import OverflowGuard as OverflowGuard
from .guard.monitors.layer_audit import LayerAudit as LayerAudit
from .guard.monitors.magnitudes import Headroom as Headroom
from .guard.monitors.magnitudes import Saturation as Saturation
from .guard.monitors.magnitudes import Underflow as Underflow
from .guard.monitors.masked_ops import MaskedOps as MaskedOps
from .guard.monitors.monitor import Monitor as Monitor
from .guard.monitors.monitor import MonitoredStep as MonitoredStep
from .guard.monitors.monitor import Notice as Notice
from .guard.monitors.replicas import Replicas as Replicas
from .guard.monitors.spikes import Spikes as Spikes
from .guard.options import Evidence as Evidence
from .guard.options import Explain as Explain
from .guard.options import Log as Log
from .guard.options import Record as Record
from .guard.options import Schedule as Schedule
from .guard.state_check import assert_finite_state as assert_finite_state
from .precision.advise import advise_precision as advise_precision
from .precision.keep_in_fp32 import keep_in_fp32 as keep_in_fp32
from .precision.precision_advice import PrecisionAdvice as PrecisionAdvice
from .record.record_lines import RecordError as RecordError
from .record.table import FlightRecord as FlightRecord
from .record.table import read_record as read_record
from .replay.explain import explain as explain
from .replay.explanation import Explanation as Explanation
from .replay.explanation import Op as Op
from .report.report import GuardCoverage as GuardCoverage
from .report.report import NonFiniteError as NonFiniteError
from .report.report import Report as Report
