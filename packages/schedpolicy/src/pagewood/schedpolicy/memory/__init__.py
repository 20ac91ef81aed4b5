"""How much memory running requests will need."""
