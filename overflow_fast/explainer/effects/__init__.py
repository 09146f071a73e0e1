"""Ends what is run again before its first effect."""
