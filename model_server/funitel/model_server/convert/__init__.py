"""Foreign model files (GGUF, llama2.c) converted to a Hugging Face folder."""
