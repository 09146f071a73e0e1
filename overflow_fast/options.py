"""The options of a guard that have fields: what is explained, and what is written.

guard = OverflowGuard(model, optimizer, record=Record("run.ofr", mib=16))
"""

from .guard.options import Evidence as Evidence
from .guard.options import Explain as Explain
from .guard.options import Log as Log
from .guard.options import Record as Record
from .guard.options import Schedule as Schedule
