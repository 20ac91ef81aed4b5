"""The runner of a CPU."""
