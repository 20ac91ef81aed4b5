"""One router for many replicas: which replica runs a request, and which request waits while none has a place."""
