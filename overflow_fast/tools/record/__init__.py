"""The flight record, read again, without torch."""
