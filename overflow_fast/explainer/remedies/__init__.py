"""Tries out what would make a replayed step finite."""
