"""The replicas of a model: load balancing, membership, holding queue, failover."""
