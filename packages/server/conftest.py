"""Makes the support of the tests importable, and that of the engine's tests, of which some of ours use a part."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE / "tests" / "support"), str(HERE.parent / "engine" / "tests" / "support")]
