"""`funitel models`: what can be served, and what serving a model would take."""
