"""Modules in float32: `keep_in_fp32()`, a remedy and a tool of its own."""
