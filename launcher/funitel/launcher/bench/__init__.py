"""`funitel bench`: loads servers and measures what their clients see. Nothing here imports the engine or torch."""
