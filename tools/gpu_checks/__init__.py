"""The checks of `gpu_check.py`, one module for each subject; this file makes their stand-ins importable."""

import sys
from pathlib import Path

# In a pack made by pack_gpu_host.py this folder does not exist; there, stand_ins lies beside gpu_check.py.
sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "engine" / "tests" / "support"))
