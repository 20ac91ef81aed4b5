"""Runs all that a host does for a GPU, without a GPU: `python tools/hollow_check.py`.

torch's build for CUDA, FlashInfer and the engine run as they are, on a CUDA runtime of our own: it gives memory, which
reads as zeros, captures graphs, refuses impossible launches, copies and captures, and counts what the host waits for;
kernels are launched and not run. So it says nothing of numbers (`emulated_check.py` does) or of a device's time.

It needs torch for CUDA, flashinfer-python, its compiled kernels (`python tools/gpu_host/kernels.py`, which needs no GPU
either) and a compiler for C++.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

_UNDER_WAY = "PAGEWOOD_HOLLOW"


def main() -> int:
    """Do the checks in a process that finds the hollow GPU; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the checks")
    parser.add_argument("--gib", default=80, type=int, help="memory of the device (default: %(default)s)")
    options = parser.parse_args()
    if _UNDER_WAY not in os.environ:
        return start(gib=options.gib)
    sys.path[:0] = [str(Path(__file__).resolve().parent)]
    from emulated_gpu.hollow import CHECKS
    from emulated_gpu.library import Counts
    from gpu_checks.host import open_host

    host, counts, num_failed = open_host(stand_in=False), Counts(), 0
    for name in options.only or CHECKS:
        start_s, num_refused = time.monotonic(), counts["refused"]
        try:
            word, text = "ok", CHECKS[name](host, counts)
            if counts["refused"] > num_refused:
                word, text = "FAILED", f"{counts['refused'] - num_refused} calls were refused; see above"
        except Exception as error:  # the other checks are told, too
            word, text = "FAILED", f"{type(error).__name__}: {error}"
        num_failed += word != "ok"
        print(f"{word:8} {time.monotonic() - start_s:6.1f} s  {name:10} {text}", flush=True)
    return 1 if num_failed else 0


def start(*, gib: int) -> int:
    """Build the hollow GPU, and begin again with it."""
    from emulated_gpu.library import build

    if torch.version.cuda is None:
        print(f"torch must be a build for CUDA, got {torch.__version__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        environment = build(Path(folder), cuda=torch.version.cuda, gib=gib, runs_kernels=False)
        return subprocess.run(
            [sys.executable, *sys.argv], env={**os.environ, **environment, _UNDER_WAY: "1"}
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
