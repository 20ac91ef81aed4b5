"""Runs `gpu_check.py` without a GPU: `python tools/emulated_check.py`, with the options of that one.

torch's build for CUDA, FlashInfer, Triton and the engine run as they are, on a CUDA runtime of our own. The kernels of
FlashInfer and Triton are translated from PTX and run by this processor: threads, warps, barriers, tensor cores. torch's
own operations, which come without PTX, are done by torch's CPU. Streams are as late as they may be, and one goes before
another by chance, so that who does not wait for what it needs is found. It says nothing of the time that a GPU takes.

It needs torch for CUDA, flashinfer-python, its kernels as PTX (`python tools/gpu_host/kernels.py --ptx`) and a compiler
for C++, on x86-64.
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
    """Do the checks; return 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="9.0a", help="compute capability that the PTX is for (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="of the turns that streams take (default: %(default)s)")
    parser.add_argument("--skew", default="0", help="per cent of their turns that warps miss (default: %(default)s)")
    parser.add_argument("--gib", default=8, type=int, help="memory of the device (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where translations are kept, for the next time")
    parser.add_argument("--run", nargs=argparse.REMAINDER, metavar="COMMAND", help="another command, on the same GPU")
    options, rest = parser.parse_known_args()
    if torch.version.cuda is None:
        print(f"torch must be a build for CUDA, got {torch.__version__}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as own:
        environment = build(
            options.folder or Path(own), cuda=torch.version.cuda, gib=options.gib, major=int(options.arch[0]),
            runs_kernels=True,
        )  # fmt: skip
        check = [sys.executable, "-W", "ignore", str(CHECK), "--slow", *rest]
        environment |= {"EMULATED_SEED": options.seed, "EMULATED_SKEW": options.skew}
        return subprocess.run(options.run or check, env={**os.environ, **environment}).returncode


if __name__ == "__main__":
    raise SystemExit(main())
