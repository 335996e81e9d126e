"""The interface of a forward pass and the batch it takes."""
