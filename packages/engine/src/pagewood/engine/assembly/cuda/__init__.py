"""Engines on CUDA devices, and what a rank on a device is made of."""
