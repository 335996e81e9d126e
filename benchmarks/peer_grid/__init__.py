"""The parts of `benchmarks/peers.py`: this server and others, each at its best, on the same files and prompts."""
