"""The scan of tensors, on each device; what every room uses besides is in `base`."""
