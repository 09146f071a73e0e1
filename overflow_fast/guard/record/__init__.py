"""The flight record: the extremes of each entry in each step, on disk."""
