"""Planted faults, and whether the guard finds them."""
