"""The protocols that clients speak."""
