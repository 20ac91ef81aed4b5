"""Observation of a running server: logs, traces, profiles and incidents."""
