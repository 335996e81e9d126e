"""From a config.json to a model spec: the tables of architectures."""
