"""Makes `serving` importable for the tests of the server."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "tests" / "support"))
