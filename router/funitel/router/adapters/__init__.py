"""Adapters: which are known by name, and which are in the memory of a replica."""
