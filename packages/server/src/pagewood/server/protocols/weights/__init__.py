"""Weights that change while the server runs."""
