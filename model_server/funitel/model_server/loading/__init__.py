"""From a model folder to an executor."""
