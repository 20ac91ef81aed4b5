"""Grammars that are being compiled, and the masks of which tokens they allow next."""
