"""Folders for what a test process makes once and keeps, such as tiny models; for anything else use tmp_path."""

import atexit
import tempfile
from functools import cache
from pathlib import Path


def scratch_folder() -> Path:
    """Return a new empty folder, which is removed when this process ends."""
    return Path(tempfile.mkdtemp(dir=_root()))


@cache
def _root() -> str:
    folder = tempfile.TemporaryDirectory(prefix="pagewood-tests-")
    atexit.register(folder.cleanup)
    return folder.name
