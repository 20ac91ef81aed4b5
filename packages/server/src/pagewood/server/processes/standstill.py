"""Whether a watcher stood still itself: a laptop was suspended, a container paused, or a virtual machine moved."""

from __future__ import annotations

STANDSTILL_S = 1.0
"""A sleep that took this much longer than it should is one during which the watcher stood still."""


def stood_still(slept_s: float, *, wanted_s: float) -> bool:
    """Return whether a watcher that wanted to sleep for `wanted_s` stood still meanwhile.

    Then what it watches probably stood still, too: the watcher starts its clocks again, and waits for its full limit.
    """
    return slept_s > wanted_s + STANDSTILL_S
