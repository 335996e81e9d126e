"""Sampling on a GPU: penalties, filters, draws and the copy of the result to the host."""
