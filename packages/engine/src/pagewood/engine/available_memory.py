"""How much main memory there is to take, by what the system and the container say."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, by version 2 and 1 of Linux' control groups."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated before something else has to yield.

    Args:
        root: of the file system with `proc` and `sys`.
    """
    left = [_system_bytes(root / "proc" / "meminfo")]
    for limit, used in _CONTAINER_FILES:
        try:
            left.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such files, or the limit is "max"
            continue
    return max(0, min(left))


def _system_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024
