"""How a model is divided among ranks, stages and nodes."""
