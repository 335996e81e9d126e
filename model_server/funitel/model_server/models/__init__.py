"""Models assembled from layers, and what wraps them: CUDA graphs, weight offload."""
