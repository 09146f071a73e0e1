"""State that a run may change, kept and restored: tensors, objects, random states."""
