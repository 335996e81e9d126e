"""What the pages of the documentation show: fenced blocks, shell commands in them, and whether each is valid."""
