"""The processes of a deployment: start, health, restart, upgrade, shutdown."""
