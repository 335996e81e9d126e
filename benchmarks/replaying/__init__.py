"""What `benchmarks/replay.py` is made of: traces, a shard simulated in virtual time, replicas, and their measures."""
