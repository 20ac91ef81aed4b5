"""A thin OpenAI-compatible server around pagewood-engine."""

__version__ = "0.1.0"
