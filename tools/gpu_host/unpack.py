"""Installs a pack on a GPU host without a network: `python3 unpack.py SITE`; needs only Python and pip."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


def main() -> int:
    """Install the files beside this one into the folder SITE, which is created if it does not exist."""
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
                f"skipped the kernels for {arch}: no GPU here has that compute capability; FlashInfer will compile them"
            )
    print(f"unpacked; now run: PYTHONPATH={site} {sys.executable} {here / 'gpu_check.py'}")
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
    """Return whether a GPU here has the compute capability `arch`, such as 9.0a."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return arch.rstrip("af") in answer.split()


if __name__ == "__main__":
    raise SystemExit(main())
