"""The HTTP routes, one module for each family. Handlers read a body, ask the service, and write an answer."""
