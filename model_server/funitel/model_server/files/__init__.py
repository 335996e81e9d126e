"""Files on disk: integrity checks, atomic folders, progress."""
