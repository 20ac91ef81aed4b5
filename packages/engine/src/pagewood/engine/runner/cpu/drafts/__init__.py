"""Drafters on a CPU."""
