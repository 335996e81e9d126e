"""What `benchmarks/gpu_pack.py` packs for a machine without a network: packages, a peer, a model, in small files."""
