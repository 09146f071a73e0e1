"""Names, selections, tensors and text, for every other room."""
