"""How many tokens of which requests are in a step, and how long it takes."""
