"""The libraries that take the place of CUDA's, and what they have counted."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-crt")


def build(folder: Path, *, cuda: str) -> dict[str, str]:
    """Compile the libraries into `folder`; return the environment in which programs find them instead of CUDA's.

    Args:
        folder: is made.
        cuda: version whose headers torch was built with, such as 13.0; they come from PyPI.

    Raises:
        subprocess.CalledProcessError: there is no such version, or the compiler fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, *(f"{name}=={cuda}.*" for name in _WHEELS)], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    (headers,) = (folder / "nvidia").glob("cu*/include")
    runtime, driver = folder / "libhollow.so", folder / "libcuda.so.1"
    shared = ["-O1", "-fPIC", "-shared"]
    subprocess.run(
        ["c++", "-std=c++17", *shared, f"-I{headers}", str(SOURCES / "runtime.cpp"), "-o", str(runtime)], check=True
    )
    subprocess.run(
        ["cc", *shared, "-Wl,-soname,libcuda.so.1", str(SOURCES / "driver.c"), "-o", str(driver)], check=True
    )
    return {
        "LD_PRELOAD": str(runtime),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")])),
    }


class Counts:
    """What the device that is not there has counted since it was last cleared."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.hollow_count.restype = ctypes.c_ulonglong

    def __getitem__(self, what: str) -> int:
        """Return how often something happened."""
        return self._library.hollow_count(what.encode())

    def clear(self) -> None:
        """Begin again, but for the calls that were refused."""
        self._library.hollow_clear()
