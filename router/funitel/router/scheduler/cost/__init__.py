"""Estimates of cost: step time, throughput, time to first token. Pure."""
