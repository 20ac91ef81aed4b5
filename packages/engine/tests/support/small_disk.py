"""File systems that are full, or that cannot be written: real ones, in memory."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, *, num_bytes: int) -> Generator[Path]:
    """Mount an empty file system of a size; the test is skipped where this is not allowed."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no room in a small file system."""
    try:
        with (place / "filler").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass


def forbid_writing(place: Path) -> None:
    """Make a mounted file system read-only, for root too."""
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, capture_output=True)
