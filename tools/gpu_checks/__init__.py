"""The checks of `gpu_check.py`, one module for each subject; this file makes the engine's test support importable."""

import sys
from pathlib import Path

# In a pack made by pack_gpu_host.py this folder does not exist; there, what it has lies beside gpu_check.py.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "engine" / "tests" / "support"))
