"""The device a rank computes on: collectives, memory, CPU affinity, host-to-device copies."""
