"""The doctor: checks ranks, collectives and arithmetic before a run."""
