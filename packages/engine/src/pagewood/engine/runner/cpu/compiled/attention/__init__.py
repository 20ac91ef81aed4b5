"""Attention over pages."""
