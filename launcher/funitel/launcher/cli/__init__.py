"""Command-line clients: chat, generate, top and key; chat and generate start a server if none runs."""
