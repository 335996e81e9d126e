"""What is told of models: snapshots, history, counts, and the stored state."""
