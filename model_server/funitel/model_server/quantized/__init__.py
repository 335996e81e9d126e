"""Quantised weights: configuration, packing, rounding, matrix products."""
