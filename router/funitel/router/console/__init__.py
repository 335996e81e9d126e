"""The console: its packaged pages."""
