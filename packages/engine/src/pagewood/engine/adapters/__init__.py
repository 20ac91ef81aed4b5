"""Adapters: low-rank changes of a model's projections, read from the folders in which trainers store them."""
