"""Files on disk: bounded reading with one set of errors, writing without waiting."""
