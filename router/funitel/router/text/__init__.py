"""Text and tokens: tokenizer, templates, grammars, stop sequences."""
