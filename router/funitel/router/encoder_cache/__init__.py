"""Which media items the shards of a replica have encoded."""
