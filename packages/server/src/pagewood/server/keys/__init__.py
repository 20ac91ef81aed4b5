"""API keys: which there are, who sends a request, what a sender may do, and how much."""
