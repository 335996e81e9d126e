"""Batches: files of requests, run at the lowest priority in what interactive requests leave free, durable on disk."""
