"""Reports as texts that can be compared."""

import re


def without_times(report):
    text = re.sub(r"\s*The guard takes .*", "", str(report))
    return re.sub(r"(replays .*), [\d.]+ s$", r"\1", text, flags=re.MULTILINE)
