"""The model shard: weights, KV memory, the forward pass, sampling, stopping and detokenizing behind gRPC."""
