"""The nouns of the router: request, sequence, token stream, request context."""
