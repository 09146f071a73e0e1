"""Tools that run when they are called: comparison, precision, pages, commands."""
