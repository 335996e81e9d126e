"""OpenTelemetry spans and their export."""
