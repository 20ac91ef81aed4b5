"""The forms of weights, and how they are made and stored. Imports no torch."""
