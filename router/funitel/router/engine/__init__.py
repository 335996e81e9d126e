"""The engine of one replica: step loop, step pipeline, recovery, request table."""
