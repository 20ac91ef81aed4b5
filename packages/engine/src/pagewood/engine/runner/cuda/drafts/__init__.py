"""Drafters on a CUDA device, and the verification of drafts."""
