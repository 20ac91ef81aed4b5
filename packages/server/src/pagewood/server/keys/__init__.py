"""API keys: which there are, which caller sends a request, and what it may do."""
