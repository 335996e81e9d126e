"""Speculative decoding: what makes draft tokens, and how the model takes or refuses them."""
