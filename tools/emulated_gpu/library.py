"""Builds the libraries that replace CUDA's, and reads what they have counted."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")
FLAGS = ["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-ftls-model=initial-exec", "-fPIC", "-shared"]
_ASSEMBLER = """#!/bin/sh
# Replaces ptxas: copies the PTX unchanged.
[ "$1" = --version ] && { echo "Cuda compilation tools, release VERSION, VVERSION.0"; exit; }
while [ $# -gt 0 ]; do
  case "$1" in
    -o) target="$2"; shift;;
    *.ptx) source="$1";;
  esac
  shift
done
cp "$source" "$target"
"""


def build(folder: Path, *, cuda: str, gib: int, major: int = 9, runs_kernels: bool) -> dict[str, str]:
    """Compile the libraries into `folder`; return the environment variables that make programs load them.

    Args:
        folder: is created.
        cuda: version of CUDA that torch was built with, such as 13.0; its headers come from PyPI.
        gib: memory of the device, GiB.
        major: major number of its compute capability.
        runs_kernels: whether kernels are run, which needs their PTX, and real memory for what they write.

    Raises:
        subprocess.CalledProcessError: PyPI has no such version, or the compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, *(f"{name}=={cuda}.*" for name in _WHEELS)], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (headers,) = (folder / "nvidia").glob("cu*/include")
    runtime, driver = folder / "libemulated.so", folder / "libcuda.so.1"
    subprocess.run(["c++", *FLAGS, f"-I{headers}", str(SOURCES / "runtime.cpp"), "-o", str(runtime)], check=True)
    link = ["cc", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*link, str(SOURCES / "driver.c"), "-o", str(driver)], check=True)
    environment = {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": _path(folder, "LD_LIBRARY_PATH"),
        "EMULATED_GIB": str(gib),
        "EMULATED_MAJOR": str(major),
    }
    return environment | (_for_kernels(folder, cuda) if runs_kernels else {})


def _for_kernels(folder: Path, cuda: str) -> dict[str, str]:
    sources = sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("*.py")])
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    kernels, assembler = folder / f"kernels-{version}", folder / "ptxas"
    kernels.mkdir(exist_ok=True)
    assembler.write_text(_ASSEMBLER.replace("VERSION", cuda))
    assembler.chmod(0o755)
    translator = ["env", "-u", "LD_PRELOAD", "-u", "PYTHONPATH", sys.executable, str(SOURCES / "translate.py")]
    return {
        "EMULATED_KERNELS": str(kernels),
        "EMULATED_TRANSLATOR": shlex.join(translator),
        "PYTHONPATH": _path(SOURCES / "site", "PYTHONPATH"),  # replaces torch's own operations
        "TRITON_PTXAS_PATH": str(assembler),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _path(first: Path, name: str) -> str:
    return os.pathsep.join(filter(None, [str(first), os.environ.get(name)]))


class Counts:
    """Counters of the emulated device since they were last cleared."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.emulated_count.restype = ctypes.c_ulonglong

    def __getitem__(self, what: str) -> int:
        """Return how often an event happened."""
        return self._library.emulated_count(what.encode())

    def clear(self) -> None:
        """Reset all counters except that of refused calls."""
        self._library.emulated_clear()
