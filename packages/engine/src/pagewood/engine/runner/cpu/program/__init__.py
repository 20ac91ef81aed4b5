"""Writes the program of a step, and reads what it has computed."""
