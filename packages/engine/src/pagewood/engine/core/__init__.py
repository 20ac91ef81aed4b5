"""The engine's core: requests, memory, plans, steps and the loop; no torch, no leaf."""
