"""The parts of `benchmarks/speculative.py`."""
