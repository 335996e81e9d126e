"""The connection between a worker and the control plane: what is said, and how it begins."""
