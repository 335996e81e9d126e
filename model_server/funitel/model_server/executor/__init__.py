"""One model step: cached batches in, one forward pass, sampled tokens out."""
