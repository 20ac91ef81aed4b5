"""Models of a server: the processes that serve each, and which of several models are loaded."""
