"""The parts of `cpu_end_to_end.py`; this file makes the support of the engine's tests importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "packages" / "engine" / "tests" / "support"))
