"""A model as data: the spec, its rules, and how it reads as JSON."""
