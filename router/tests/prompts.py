"""Prompts of tests."""

LONG = 30  # tokens
