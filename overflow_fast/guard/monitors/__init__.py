"""Monitors of finite steps: one file each behind one protocol."""
