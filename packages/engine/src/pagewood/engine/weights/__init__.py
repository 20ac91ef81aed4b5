"""The forms in which weights are kept, and how they are made and stored. Imports no torch."""
