"""Replays a non-finite step and finds out which operation made it, and why."""
