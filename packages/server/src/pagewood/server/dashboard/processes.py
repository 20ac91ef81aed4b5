"""CPU time and memory of the processes of this server, from /proc; on systems without it there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagewood.server.metrics.rank_processes import rank_processes

_PROC = Path("/proc")


class ProcessLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the server."""

    name: str
    pid: int
    cpu: float
    """Cores that it used since the last look, 1.0 is one core."""
    rss_bytes: int
    """Resident memory."""


class Processes:
    """This process and its children. The first `look` finds no CPU time used."""

    __slots__ = ("_cpu_s", "_looked_s")

    def __init__(self) -> None:
        self._cpu_s: dict[int, float] = {}
        """CPU time of each process at the last look, by pid."""  # written by: look
        self._looked_s = 0.0  # written by: look

    def look(self) -> tuple[ProcessLoad, ...]:
        """Return the use of CPU time and memory by the processes since the last call."""
        now_s = time.monotonic()
        before, passed_s = self._cpu_s, now_s - self._looked_s
        self._cpu_s, self._looked_s = {}, now_s
        found: list[ProcessLoad] = []
        for pid, known in _with_ranks((os.getpid(), *_children())):
            try:
                cpu_s, rss_bytes = _used(pid)
                name = known or ("http" if pid == os.getpid() else _name(pid))
            except (OSError, ValueError, IndexError):  # it has ended
                continue
            self._cpu_s[pid] = cpu_s
            cpu = (cpu_s - before[pid]) / passed_s if pid in before and passed_s > 0 else 0.0
            found.append(ProcessLoad(name=name, pid=pid, cpu=round(cpu, 3), rss_bytes=rss_bytes))
        return tuple(found)


def _with_ranks(pids: Sequence[int]) -> list[tuple[int, str]]:
    """Return processes, each with an empty name, and behind each the ranks that it has started, with theirs."""
    found: list[tuple[int, str]] = []
    for pid in pids:
        found.append((pid, ""))
        found += [(rank, name) for name, rank in rank_processes(pid).items()]
    return found


def _children() -> list[int]:
    found: list[int] = []
    for task in _PROC.glob("self/task/*/children"):
        try:
            found += [int(pid) for pid in task.read_text().split()]
        except OSError:
            continue
    return sorted(found)


def _used(pid: int) -> tuple[float, int]:
    """Return the CPU time in seconds and the resident memory in bytes of a process."""
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _name(pid: int) -> str:
    """Return the name of a child's stage, from its module, or its command."""
    words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
    if "-m" in words:
        return words[words.index("-m") + 1].rpartition(".")[2].removesuffix("_process")
    return Path(words[0]).name
