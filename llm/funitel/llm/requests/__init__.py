"""Requests that are started: their handles and their results."""
