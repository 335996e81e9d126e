"""Grammars of clients for llguidance: a regular expression, or a JSON schema closed to keys it does not declare."""
