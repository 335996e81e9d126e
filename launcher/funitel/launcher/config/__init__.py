"""Flags, variables and the configuration file resolved into the settings and command lines of every child."""
