"""State of each running sequence: the sequence table and its detokenizer."""
