"""What is seen of a running server: logs, traces, profiles, and what went wrong."""
