"""Logits to tokens and log-probabilities, on the CPU."""
