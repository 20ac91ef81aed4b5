"""Metrics of the server: the measured numbers, and their form for Prometheus."""
