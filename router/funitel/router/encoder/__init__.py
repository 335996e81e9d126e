"""The engine of encoder models: queue, batching, service."""
