"""Planted faults, and the test that the guard finds them."""
