"""Continuous batching for language models, from parts that can be used alone."""

__version__ = "0.1.0"
