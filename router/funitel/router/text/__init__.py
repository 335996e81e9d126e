"""Text and tokens: tokenizer, chat templates, grammars, stop sequences."""
