"""`funitel chat` and `funitel generate`: clients of a server that runs, or of one started for the occasion."""
