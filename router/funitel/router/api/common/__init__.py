"""What every protocol shares: bodies, handlers, errors, base schemas."""
