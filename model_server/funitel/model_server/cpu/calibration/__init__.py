"""What the fused step settles by itself when a model is loaded: threads, and frames of keys."""
