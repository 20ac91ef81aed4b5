"""Decoders of Hugging Face folders: their configuration, their weights and their forward pass."""
