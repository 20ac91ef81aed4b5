"""The engine's core: requests, KV memory, plans, steps and the loop. It imports neither torch nor a leaf package."""
