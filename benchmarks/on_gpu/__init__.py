"""The parts of `gpu.py`, one module for each subject; this file makes the stand-ins of `--stand-in` importable."""

import sys
from pathlib import Path

# In a pack made by pack_gpu_host.py this folder does not exist; there, stand_ins lies beside gpu.py.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "engine" / "tests" / "support"))
