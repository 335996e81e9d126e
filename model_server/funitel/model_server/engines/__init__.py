"""Engines beside our own: other programs' code that computes a model behind the same calls."""
