"""Notices an admission that stands still: requests wait, none runs, memory is free, and nothing is planned."""

from __future__ import annotations

import logging

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.state import EngineState

_log = logging.getLogger(__name__)

STUCK_PASSES = 64
"""Passes in a row without a grant after which admission counts as stuck, if they have also taken `STUCK_S`."""
STUCK_S = 1.0
"""Seconds. A longer time between two passes does not count: the process stood still."""


class Watchdog:
    """Counts passes without a grant. Invariant: it is 0 unless the last pass could have admitted a request."""

    __slots__ = ("_last_s", "_since_s", "is_stuck", "num_passes", "stuck_s")

    def __init__(self) -> None:
        self.num_passes = 0
        """Passes in a row that planned nothing although they could have."""  # written by: watchdog
        self.is_stuck = False
        """Whether those are too many."""  # written by: watchdog
        self.stuck_s = 0.0
        """How long they have taken if they are too many, otherwise 0."""  # written by: watchdog
        self._since_s = 0.0  # written by: watchdog
        self._last_s = 0.0  # written by: watchdog

    def reset(self) -> None:
        """Note that something was planned, or that nothing could be."""
        if self.is_stuck:
            _log.warning("admission goes on after %d passes without a grant", self.num_passes)
        self.num_passes = 0
        self.is_stuck = False
        self.stuck_s = 0.0

    def nothing_planned(self, state: EngineState, kv: AnyKV, now_s: float) -> None:
        """Note a pass without a grant."""
        waiting = state.waiting
        is_free = kv.num_available > 0 and kv.num_free_rows > 0
        num_ready = len(waiting) - waiting.num_recalling - state.num_behind_paused
        if state.running or state.draining or num_ready <= 0 or not is_free:
            self.reset()
            return
        if not self.num_passes:
            self._since_s = now_s
        elif now_s - self._last_s > STUCK_S:
            self._since_s += now_s - self._last_s
        self._last_s = now_s
        self.num_passes += 1
        if self.num_passes < STUCK_PASSES or now_s - self._since_s < STUCK_S:
            return
        self.stuck_s = now_s - self._since_s
        if self.is_stuck:
            return
        self.is_stuck = True
        _log.error(
            "admission stands still: %d requests wait (%d of them parked, %d recalled), none runs, %d are paused; "
            "%d pages are free, %d cached and %d retained of %d, %d rows are free; nothing was planned in %d passes "
            "during %.1f s",
            len(waiting), len(waiting) - waiting.num_candidates, waiting.num_recalling, len(state.held), kv.num_free,
            kv.num_cached, kv.num_retained, kv.num_pages, kv.num_free_rows, self.num_passes, now_s - self._since_s,
        )  # fmt: skip
