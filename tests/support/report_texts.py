"""Reports as texts that can be compared."""

import re


def without_times(report):
    return re.sub(r"\s*The guard takes .*", "", str(report))
