"""Sound: decode files in a sandbox, make spectrograms of them, and make transcripts of a model's tokens."""
