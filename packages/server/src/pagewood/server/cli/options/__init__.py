"""The options of `serve` and `generate`, one module for each group of the help."""
