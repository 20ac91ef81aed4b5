"""Ollama's protocol: chat, generate, and what it says about models."""
