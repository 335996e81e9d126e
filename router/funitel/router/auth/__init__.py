"""API keys at work: accounts, rate limits, token charges."""
