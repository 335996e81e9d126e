"""What models take of a machine: memory and GPUs, estimated, measured and shared out."""
