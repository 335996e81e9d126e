"""Ways to read fields of a ModelSpec off a config.json, which rows of the tables share."""
