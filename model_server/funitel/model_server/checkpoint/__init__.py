"""Tensors of a checkpoint by name and slice, in every storage format."""
