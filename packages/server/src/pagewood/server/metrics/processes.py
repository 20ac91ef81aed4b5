"""CPU time and memory of the server's processes, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUsage:
    """The use of resources by one process."""

    cpu_s: float
    """User and system time of all its threads."""
    resident_bytes: int
    num_threads: int
    num_open_files: int


def usage_of(processes: Mapping[str, int]) -> dict[str, ProcessUsage]:
    """Return the use of each process by its name; there is no entry without /proc or without the process.

    Args:
        processes: name -> process id.
    """
    found: dict[str, ProcessUsage] = {}
    for name, pid in processes.items():
        folder = _PROC / str(pid)
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            num_open_files = len(os.listdir(folder / "fd"))
        except OSError:
            continue
        found[name] = ProcessUsage(
            cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            num_threads=int(fields[17]),
            num_open_files=num_open_files,
        )
    return found
