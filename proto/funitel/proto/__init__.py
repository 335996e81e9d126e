"""Code shared by router, shards and launcher: wire format, step types, errors, settings, logging, tracing."""
