"""HTTP/1.1 and SSE on the wire: connections, limits, backpressure, drain, TLS."""
