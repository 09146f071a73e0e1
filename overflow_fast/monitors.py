"""The monitors of a guard, and what one of your own is made of.

guard = OverflowGuard(model, optimizer, monitors=[Spikes(), Underflow(every=100)])
"""

from .guard.monitors.monitor import Monitor as Monitor
from .guard.monitors.monitor import MonitoredStep as MonitoredStep
from .guard.monitors.monitor import Notice as Notice

# In the order of the table of docs/arguments.md.
# isort: off
from .guard.monitors.spikes import Spikes as Spikes
from .guard.monitors.magnitudes import Saturation as Saturation
from .guard.monitors.magnitudes import Headroom as Headroom
from .guard.monitors.magnitudes import Underflow as Underflow
from .guard.monitors.updates import Updates as Updates
from .tools.masked_ops import MaskedOps as MaskedOps
from .guard.monitors.layer_audit import LayerAudit as LayerAudit
from .guard.monitors.replicas import Replicas as Replicas
# isort: on

# Those that come with the package.
MONITORS: tuple[type[Monitor], ...] = tuple(
    each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, Monitor) and each is not Monitor
)
