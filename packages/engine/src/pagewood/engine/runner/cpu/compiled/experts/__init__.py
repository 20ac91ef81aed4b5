"""Mixtures of experts: which of them a token uses, rows grouped by expert, and sums over the experts of a token."""
