"""Downloads the part of the CUDA toolkit that compiles FlashInfer's kernels from PyPI; needs no GPU or installer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cublas")
_OTHERS = ("nvidia-curand",)
"""Wheels with versions of their own. Only the headers of cuRAND and cuBLAS are used."""
_STOPPING = """#!/usr/bin/env bash
exec COMPILER --no-compress "${@//code=sm_/code=compute_}"
"""


def fetch_toolkit(folder: Path, *, version: str) -> Path:
    """Download the toolkit for Linux on x86-64, 600 MB, unless `folder` has it; return its root, for CUDA_HOME.

    Args:
        folder: is created; what an earlier call has completed is used as it is.
        version: major and minor, such as 13.0.

    Raises:
        subprocess.CalledProcessError: PyPI has no such version, or no C compiler is installed.
    """
    complete = folder / f"toolkit-{version}-is-complete"
    if complete.exists():
        return next((folder / "nvidia").glob("cu*"))
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    names = [f"{name}=={version}.*" for name in _WHEELS] + list(_OTHERS)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
    subprocess.run([*command, *names], check=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (root,) = (folder / "nvidia").glob("cu*")
    for program in [*(root / "bin").iterdir(), *(root / "nvvm" / "bin").iterdir()]:
        program.chmod(0o755)
    _complete(root)
    complete.touch()
    return root


def keep_ptx(root: Path) -> None:
    """Make nvcc stop at uncompressed PTX, which `emulated_gpu` can read."""
    nvcc = root / "bin" / "nvcc"
    compiler = nvcc.with_name("nvcc-as-it-came")
    if compiler.exists():
        return
    nvcc.rename(compiler)
    nvcc.write_text(_STOPPING.replace("COMPILER", str(compiler)))
    nvcc.chmod(0o755)


def _complete(root: Path) -> None:
    """Add what the linker expects of an installed toolkit: library names without versions, and a stub of the driver."""
    library = next((root / "lib").glob("libcudart.so.*"))
    (root / "lib" / "libcudart.so").symlink_to(library.name)
    (root / "lib64").symlink_to("lib")
    stubs = root / "lib" / "stubs"
    stubs.mkdir(exist_ok=True)
    link = ["cc", "-shared", "-x", "c", "-", "-Wl,-soname,libcuda.so.1", "-o", str(stubs / "libcuda.so")]
    subprocess.run(link, input=b"", check=True)
