"""Decoding strategies of single rows; see docs/decoding.md."""
