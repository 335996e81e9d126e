"""Speculative decoding: what makes draft tokens, how they are verified, and when they pay."""
