"""The doctor: checks ranks, links, collectives and arithmetic before a run."""
