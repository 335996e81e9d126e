"""Commands about the users of a running server: users, their keys, usage and the audit."""
