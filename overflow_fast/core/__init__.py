"""What every other room may use: names, selections, tensors, text."""
