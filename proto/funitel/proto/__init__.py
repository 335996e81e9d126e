"""Code shared by router, shards and launcher: wire format, step types, errors, settings, logging, tracing."""

import os

# Read as gRPC is imported: its handlers of forks crash some processes that are started while calls are in flight.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
