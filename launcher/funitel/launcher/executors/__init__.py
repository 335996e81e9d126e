"""Executors: where the shards of a replica run, behind one interface."""
