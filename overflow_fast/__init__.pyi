# Written by docs/tools/tables.py.
from typing import Final

from . import integrations as integrations
from . import monitors as monitors
from . import options as options
from .detector.debug import DebugUnderflowOverflow as DebugUnderflowOverflow
from .detector.debug import detect_overflow as detect_overflow
from .detector.debug import get_abs_min_max as get_abs_min_max
from .explainer.explain import explain as explain
from .guard.guard import OverflowGuard as OverflowGuard
from .guard.record.record_lines import RecordError as RecordError
from .guard.report.explanation import Explanation as Explanation
from .guard.report.report import NonFiniteError as NonFiniteError
from .guard.report.report import Report as Report
from .guard.state_check import assert_finite_state as assert_finite_state
from .precision.keep_in_fp32 import keep_in_fp32 as keep_in_fp32
from .scanner.ops import Stat as Stat
from .scanner.ops import scan as scan
from .tools.compare.compare_runs import compare as compare
from .tools.compare.live import compare_live as compare_live
from .tools.compare.recorded import RecordingError as RecordingError
from .tools.compare.recording import recording as recording
from .tools.precision.advise import advise_precision as advise_precision
from .tools.record.reading import read_record as read_record

__all__ = [
    "DebugUnderflowOverflow",
    "Explanation",
    "NonFiniteError",
    "OverflowGuard",
    "RecordError",
    "RecordingError",
    "Report",
    "Stat",
    "advise_precision",
    "assert_finite_state",
    "compare",
    "compare_live",
    "detect_overflow",
    "explain",
    "get_abs_min_max",
    "integrations",
    "keep_in_fp32",
    "monitors",
    "options",
    "read_record",
    "recording",
    "scan",
]
__version__: Final[str]
