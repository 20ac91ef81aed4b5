"""Checks the host side of the CUDA path without a GPU: `python tools/hollow_check.py`.

torch's CUDA build, FlashInfer and the engine run unchanged on a CUDA runtime of our own. It provides memory that reads
as zeros, captures graphs, refuses invalid launches, copies and captures, and counts what the host waits for. Kernels
are launched but not run, so neither results (see `emulated_check.py`) nor a device's times are checked.

Requirements: torch for CUDA, flashinfer-python, its compiled kernels (`python tools/gpu_host/kernels.py`, which needs
no GPU either) and a C++ compiler. See tools/emulated_gpu/README.md.
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

_IS_CHILD = "PAGEWOOD_HOLLOW"


def main() -> int:
    """Run the checks in a process that sees the hollow GPU; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these checks")
    parser.add_argument("--gib", default=80, type=int, help="memory of the device, GiB (default: %(default)s)")
    options = parser.parse_args()
    if _IS_CHILD not in os.environ:
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
                word, text = "FAILED", f"{counts['refused'] - num_refused} invalid calls were refused; see above"
        except Exception as error:  # the remaining checks still run
            word, text = "FAILED", f"{type(error).__name__}: {error}"
        num_failed += word != "ok"
        print(f"{word:8} {time.monotonic() - start_s:6.1f} s  {name:10} {text}", flush=True)
    return 1 if num_failed else 0


def start(*, gib: int) -> int:
    """Build the hollow GPU, and run this script again with it."""
    from emulated_gpu.library import build

    if torch.version.cuda is None:
        print(f"torch must be a build for CUDA, got {torch.__version__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        environment = build(Path(folder), cuda=torch.version.cuda, gib=gib, runs_kernels=False)
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, **environment, _IS_CHILD: "1"}).returncode


if __name__ == "__main__":
    raise SystemExit(main())
