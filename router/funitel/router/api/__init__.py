"""The HTTP routes, a package for each protocol. Handlers read a body, ask the service, and write an answer."""
