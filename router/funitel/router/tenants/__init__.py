"""Tenants: the users and keys that the control plane has, sessions of the console, and charges that last."""
