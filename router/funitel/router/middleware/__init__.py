"""ASGI middleware: access log, authentication, route context, tracing."""
