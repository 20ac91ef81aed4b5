"""Tiny models of every supported family, for comparison with `transformers`; one module per lineage."""
