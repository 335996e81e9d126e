"""What runs the model of an `LLM`: threads of this process, or processes of their own."""
