"""Processes of this machine: their output, their health, their end."""
