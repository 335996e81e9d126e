"""The router's half of the KV cache: which blocks are free, in use or cached. Pure."""
