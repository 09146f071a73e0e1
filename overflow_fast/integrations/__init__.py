"""Integrations of overflow_fast into other libraries."""
