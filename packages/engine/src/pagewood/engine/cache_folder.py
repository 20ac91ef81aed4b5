"""The folder for results that later starts reuse. It is an optimisation: an engine starts without it."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "PAGEWOOD_CACHE"
REMEDY = f"make room there, or set {VARIABLE} to a folder that can be written"
"""Advice to the user about a cache that cannot be written."""
_ABANDONED_S = 24 * 3600.0


def cache_root() -> Path:
    """Return the folder of the environment's PAGEWOOD_CACHE, or ~/.cache/pagewood."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagewood"
    return Path(os.environ.get(VARIABLE) or usual)


def sleep_folder() -> Path:
    """Return the folder for what must not be lost while a model sleeps; its files have no names there."""
    folder = cache_root() / "asleep"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_abandoned(folder: Path, pattern: str) -> None:
    """Remove unfinished files and folders of processes that were killed: those that have not changed for a day."""
    with suppress(OSError):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
