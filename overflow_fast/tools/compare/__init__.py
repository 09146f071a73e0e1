"""Two runs, devices or precisions of a model, compared layer by layer."""
