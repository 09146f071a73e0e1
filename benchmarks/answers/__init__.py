"""Failures of public reports, made again small, and what tools say of them."""
