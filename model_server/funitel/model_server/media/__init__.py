"""Images and sounds: their encoders, and the cache of what they made."""
