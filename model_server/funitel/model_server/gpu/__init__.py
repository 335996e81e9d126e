"""What makes a GPU fast: Triton kernels, each beside the torch code that says what it computes."""
