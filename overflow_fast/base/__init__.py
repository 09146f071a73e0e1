"""Nested values, modules' names, tensors, operators and text, for every room."""
