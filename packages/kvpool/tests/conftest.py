import sys
from pathlib import Path

from hypothesis import settings

sys.path.append(str(Path(__file__).parent / "support"))

# No deadline: the time of an example depends on the machine, not on the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
