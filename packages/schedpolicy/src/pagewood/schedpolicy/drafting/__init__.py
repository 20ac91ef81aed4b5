"""Speculative decoding: how many tokens are drafted for each request in each step."""
