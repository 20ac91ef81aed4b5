"""A GPU that is not there; see `tools/emulated_check.py`, and `tools/hollow_check.py`, where it runs no kernels."""
