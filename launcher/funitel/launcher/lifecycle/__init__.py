"""The life of models: launch, memory, restarts, sleep, eviction, and their adoption by a new control plane."""
