"""Ranks on several hosts: how hosts meet, and how each has what the ranks of the others write."""
