import sys
from pathlib import Path

from hypothesis import settings

sys.path.append(str(Path(__file__).parent / "support"))

# The duration of an example depends on the machine more than on the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
