"""Replaces torch's CUDA operations in every Python process that has this folder on its path."""

import os
import sys

if os.environ.get("EMULATED_KERNELS") and "libemulated" in os.environ.get("LD_PRELOAD", ""):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import aten

    aten.install()
