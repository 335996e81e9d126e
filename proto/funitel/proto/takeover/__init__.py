"""What a shard tells a router that takes over from another one: kept outputs, running rows, numbered calls."""
