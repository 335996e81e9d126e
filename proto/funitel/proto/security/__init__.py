"""API keys at rest and TLS contexts."""
