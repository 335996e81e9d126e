"""From a model id to a complete folder on this disk."""
