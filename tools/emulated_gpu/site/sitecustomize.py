"""Python imports this at its start where this folder is on its path: torch's operations are stood in for."""

import os
import sys

if os.environ.get("EMULATED_KERNELS") and "libemulated" in os.environ.get("LD_PRELOAD", ""):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import aten

    aten.install()
