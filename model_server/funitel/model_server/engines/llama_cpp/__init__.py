"""llama.cpp computes a GGUF; what is asked of a sequence, and how its tokens are sampled, stays ours."""
