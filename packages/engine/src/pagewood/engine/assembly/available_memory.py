"""How much main memory is available, according to the system and the container."""

from __future__ import annotations

import os
from pathlib import Path

_CONTAINER_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the limit and the use of a container's memory, in versions 2 and 1 of Linux' control groups."""


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without taking memory from other programs.

    Args:
        root: the folder that contains `proc` and `sys`.
    """
    left = [_system_bytes(root / "proc" / "meminfo")]
    for limit, used in _CONTAINER_FILES:
        try:
            left.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # no such file, or the limit is "max"
            continue
    return max(0, min(left))


def _system_bytes(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux: half of the machine's memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kibibytes) * 1024
