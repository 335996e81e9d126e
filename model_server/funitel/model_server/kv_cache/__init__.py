"""The shard's half of the KV cache: the pool of blocks and its host tier."""
