"""The keeper's side of a takeover: its messages and its socket, and what the kernel knows of a connection."""
