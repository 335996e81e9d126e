"""The gRPC servicer and the step socket: calls in, compute thread, answers out."""
