"""The asyncio router: HTTP in, steps out to the shards. Never imports torch."""
