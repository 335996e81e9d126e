"""Public clients, as they are."""
