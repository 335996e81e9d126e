"""`funitel-server perplexity`: how well a model predicts a text, and how far it is from a reference."""
