"""Counts of work that do not depend on what else a machine does, and their bounds."""
