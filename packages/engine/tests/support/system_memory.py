"""How much memory processes have of the system."""

# pyright: basic
# psutil has no types.

import re
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def used_bytes(process: psutil.Process) -> int:
    """Return the memory of a process that is in no file of a disk."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(re.search(rf"{kind}:\s+(\d+)", status)[1]) << 10 for kind in ("RssAnon", "RssShmem"))  # pyright: ignore[reportOptionalSubscript]


def settled_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory of all of them when the system has provided what is provided in advance."""
    before, now = 0, sum(map(used_bytes, processes))
    while now != before:
        time.sleep(0.1)
        before, now = now, sum(map(used_bytes, processes))
    return now
