"""Unpacks a pack on a GPU host without a network: `python3 unpack.py SITE`; it needs pip and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


def main() -> int:
    """Install what lies beside this file into the folder SITE, which is made if it is not there."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    here, site = Path(__file__).resolve().parent, Path(sys.argv[1])
    wheels = [str(wheel) for wheel in sorted((here / "wheels").glob("*.whl"))]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *wheels], check=True)
    with tarfile.open(here / "flashinfer.tar.xz") as packed:
        packed.extractall(site, filter="data")
    print(f"unpacked; now: PYTHONPATH={site} {sys.executable} {here / 'gpu_check.py'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
