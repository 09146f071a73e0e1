"""From a verdict to words and files."""
