"""Tenants: users, their API keys, quotas, usage and sessions, and the audit, in the database of the control plane."""
