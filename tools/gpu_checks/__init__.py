"""The checks of `gpu_check.py`, one module for each thing that is checked."""
