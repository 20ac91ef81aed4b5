"""How tensors are stored: their files, names and places, and how they are read."""
