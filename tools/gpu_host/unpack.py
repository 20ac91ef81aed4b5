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
    install(sorted((here / "wheels").glob("*.whl")), site)
    extract(here / "flashinfer.tar.xz", site)
    for kernels in here.glob("kernels-*.tar.xz"):
        arch = kernels.name.removeprefix("kernels-").removesuffix(".tar.xz")
        if has_gpu(arch):
            extract(kernels, site)
        else:
            print(
                f"kernels for {arch} are left out: no GPU here has that compute capability; FlashInfer compiles its own"
            )
    print(f"unpacked; now: PYTHONPATH={site} {sys.executable} {here / 'gpu_check.py'}")
    return 0


def install(wheels: list[Path], site: Path) -> None:
    """Install wheels into the folder."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    subprocess.run([*pip, "--target", str(site), *map(str, wheels)], check=True)


def extract(packed: Path, site: Path) -> None:
    """Unpack a tar.xz into the folder."""
    with tarfile.open(packed) as files:
        files.extractall(site, filter="data")


def has_gpu(arch: str) -> bool:
    """Whether a GPU here has the compute capability `arch`, such as 9.0a."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return arch.rstrip("af") in answer.split()


if __name__ == "__main__":
    raise SystemExit(main())
