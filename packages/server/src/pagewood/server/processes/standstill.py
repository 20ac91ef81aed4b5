"""Detects that a watcher itself stood still: a laptop was suspended, a container paused, or a virtual machine moved."""

from __future__ import annotations

STANDSTILL_S = 1.0
"""If a sleep took this much longer than planned, the watcher stood still during it."""


def stood_still(slept_s: float, *, wanted_s: float) -> bool:
    """Return whether a watcher stood still while it wanted to sleep for `wanted_s`.

    Then the watched process probably stood still, too: the watcher starts its clocks again, and waits for its full
    limit.
    """
    return slept_s > wanted_s + STANDSTILL_S
