"""Which cores each rank computes on: those of one memory node, where a node has enough."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_SIBLINGS = "cpu0/topology/thread_siblings_list"


def divided_cores(count: int, *, root: Path = _CPUS) -> list[list[int]]:
    """Return disjoint logical processors for each of `count` ranks, of those that this process may use.

    Processors of one core stay together, and so do cores of one memory node as far as ranks and nodes allow it. Empty
    lists: the system does not say what may be used, or binds no threads.

    Args:
        count: of ranks.
        root: the folder that describes processors.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(count)]
    usable = sorted(os.sched_getaffinity(0))
    cores: dict[tuple[int, int, int], list[int]] = {}
    for number in usable:
        cores.setdefault((_node(root, number), *_core(root, number)), []).append(number)
    ordered = [cores[key] for key in sorted(cores)]
    return [
        [
            number
            for core in ordered[rank * len(ordered) // count : (rank + 1) * len(ordered) // count]
            for number in core
        ]
        for rank in range(count)
    ]


def num_cores() -> int:
    """Return the physical cores that this process may use; hyperthreads of one core count once if that is known."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        per_core = len((_CPUS / _SIBLINGS).read_text().strip().replace("-", ",").split(","))
    except OSError:
        per_core = 1
    return max(1, usable // per_core)


@contextmanager
def threads_on(cores: Sequence[int]) -> Generator[None]:
    """Let threads that are started inside run on these processors only; the calling thread is free again afterwards."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)  # of this thread
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _node(root: Path, number: int) -> int:
    nodes = [int(one.name[4:]) for one in (root / f"cpu{number}").glob("node[0-9]*")]
    return min(nodes, default=0)


def _core(root: Path, number: int) -> tuple[int, int]:
    """Return package and core of a processor; itself if the system does not say."""
    topology = root / f"cpu{number}" / "topology"
    try:
        return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text())
    except (OSError, ValueError):
        return 0, number
