"""Calls of a step, kept so that they can be made again."""
