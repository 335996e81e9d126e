"""Vision towers by family: transformers' modules with the checkpoint's tensors, and what goes into and out of them."""
