"""API keys: accounts, rate limits, token charges."""
