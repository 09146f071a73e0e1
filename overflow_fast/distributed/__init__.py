"""Ranks that decide together."""
