"""The measurements of `gpu.py`, one module for each thing that is measured."""
