"""The models that a guard watches, their inputs, and the tensors of a step."""
