"""Makes the package `stand_ins` importable for the tests and the benchmarks of the engine."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "tests" / "support"))
