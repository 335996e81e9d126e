"""Attention over the paged KV pool: one interface, its backends, and the choice between them."""
