"""Ollama's protocol: chat, generate, and descriptions of models."""
