"""Models that read a text whole: embeddings, classes, and what stands behind a mask."""
