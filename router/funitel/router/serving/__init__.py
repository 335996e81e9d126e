"""One generation request from its arrival to its last token."""
