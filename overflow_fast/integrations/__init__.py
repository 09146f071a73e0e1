"""overflow_fast inside other libraries."""
