"""Routes of the control socket for tenants."""
