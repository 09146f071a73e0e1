"""Modules in float32 while the rest stays in half precision."""
