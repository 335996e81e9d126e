"""Models that read a prompt with an encoder and answer it with a decoder that looks at what was read."""
