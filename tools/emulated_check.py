"""Runs `gpu_check.py` on an emulated GPU: `python tools/emulated_check.py`, with the same options.

torch's CUDA build, FlashInfer, Triton and the engine run unchanged on a CUDA runtime of our own. The kernels of
FlashInfer and Triton are translated from PTX and run on the CPU: threads, warps, barriers, tensor cores. torch's own
kernels come without PTX; torch's CPU operations replace them. Streams run as late as they may, in a random order, so
that missing synchronization shows. Times measured here say nothing about a GPU.

Requirements: torch for CUDA, flashinfer-python, its kernels as PTX (`python tools/gpu_host/kernels.py --ptx`) and a C++
compiler, on x86-64. See tools/emulated_gpu/README.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from emulated_gpu.library import build

CHECK = Path(__file__).resolve().parent / "gpu_check.py"


def main() -> int:
    """Run the checks; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="9.0a", help="compute capability of the PTX (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="seed of the order in which streams run (default: %(default)s)")
    parser.add_argument("--skew", default="0", help="percentage of turns that a warp skips (default: %(default)s)")
    parser.add_argument("--gib", default=8, type=int, help="memory of the device, GiB (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder that keeps translated kernels for the next run")
    parser.add_argument(
        "--run",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="run this command on the emulated GPU instead of the checks",
    )
    options, rest = parser.parse_known_args()
    if torch.version.cuda is None:
        print(f"torch must be a build for CUDA, got {torch.__version__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        environment = build(
            options.folder or Path(temporary), cuda=torch.version.cuda, gib=options.gib, major=int(options.arch[0]),
            runs_kernels=True,
        )  # fmt: skip
        check = [sys.executable, "-W", "ignore", str(CHECK), "--slow", *rest]
        environment |= {"EMULATED_SEED": options.seed, "EMULATED_SKEW": options.skew}
        return subprocess.run(options.run or check, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    raise SystemExit(main())
