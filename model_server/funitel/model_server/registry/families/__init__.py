"""Rows of the table of decoders, by family."""
