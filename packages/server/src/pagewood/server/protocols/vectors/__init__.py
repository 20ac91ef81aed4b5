"""Vectors of texts, and what follows from them: embeddings, rankings and scores."""
