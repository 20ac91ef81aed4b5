"""Which running requests give way, and how often."""
