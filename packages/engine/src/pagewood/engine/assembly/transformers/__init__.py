"""Engines whose model `transformers` computes, and which models these are."""
