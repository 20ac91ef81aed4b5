"""Answers of models, written as their chat templates write them."""
