"""The client of the shards: gRPC, step socket, fencing, capabilities."""
