"""Worker processes for untrusted work, killed at a time or memory limit."""
