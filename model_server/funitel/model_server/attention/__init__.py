"""Attention over blocks of keys and values: one interface, its backends, and the choice between them."""
