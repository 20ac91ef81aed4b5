"""Engines on a CPU, and what a rank on a CPU is made of."""
