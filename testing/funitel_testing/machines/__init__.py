"""Workers and the control plane's end of them, for tests: over imitated shards, or in network namespaces."""
