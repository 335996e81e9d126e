"""Routers, keepers and launchers that die under load: requests as bytes, and answers compared byte by byte."""
