"""TGI's native routes: generate, tokenize."""
