"""What every terminal program shares: an HTTP client of the standard library, and line input and status output."""
