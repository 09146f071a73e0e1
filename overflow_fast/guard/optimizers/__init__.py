"""The optimizers of a guard: their hooks, wrappers, engines and GradScalers."""
