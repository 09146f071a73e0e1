"""The guard: watches a training run and decides before the optimizer steps."""
