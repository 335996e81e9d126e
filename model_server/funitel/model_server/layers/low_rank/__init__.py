"""Adapters in torch: what they add to the outputs of a layer, and kernels of it."""
