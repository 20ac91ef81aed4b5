"""A GPU that is not there, and what is checked with it; see `tools/hollow_check.py`."""
