"""API keys: the keys of a server, the caller of a request, and the rights of the caller."""
