"""Prometheus metrics, roofline, OpenTelemetry attributes."""
