"""Vectors of texts, and results from them: embeddings, rankings and scores."""
