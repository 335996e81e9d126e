"""Layers that keep a state of a sequence: their recurrences, and the tokens of a batch that pass them."""
