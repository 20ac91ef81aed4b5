"""Metrics of the server: what is measured, and how Prometheus gets it."""
