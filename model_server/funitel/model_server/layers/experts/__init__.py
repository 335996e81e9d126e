"""Mixtures of experts in Triton kernels."""
