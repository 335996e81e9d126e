"""The worker agent: offers its machine to a control plane and runs shards for it."""
