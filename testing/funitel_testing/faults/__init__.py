"""Faults done to running deployments: what is asked meanwhile, what may be lost, and what was (`make faults`)."""
