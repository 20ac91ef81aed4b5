"""Weights in the layouts that the kernels read."""
