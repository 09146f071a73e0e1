"""The check for a machine with a GPU: stages in the order of their value, one summary.

The modules that run stages import nothing but the standard library.
"""
