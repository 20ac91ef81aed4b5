"""The signs of life of the ranks of a model: what makes a rank that is lost, late or stuck end its group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from pagewood.engine.runner.ranks.early_beats import BEAT_S
from pagewood.engine.runner.ranks.segment import Segment

HEARTBEAT_S = 5.0
"""A rank without a beat for this long, while a step is computed, is late, and the group ends."""
LOADING_HEARTBEAT_S = 30.0
"""The same for a rank that is not ready yet. Its beats need the interpreter's lock, which an import holds while
libraries are read from a cold disk, and so may a copy from a mapped file."""


class Pulse:
    """A thread that counts beats of its own rank, and watches those of the others.

    It counts its own beats instead of seconds. So a machine that was suspended, or a container that was paused with all
    ranks, is not taken for a late rank. Silence counts until all ranks are ready, and then while a step is computed or
    an answer is awaited: an idle process may be busy with something else, and nothing waits for it.

    Invariant: after `end` is called, or has been noted, the group stays ended.

    Args:
        segment: of the group.
        rank: this one.
        heartbeat_s: how long a rank may be silent.
        loading_s: how long a rank may be silent before `begin`.
        stands_still: whether this rank has stopped to load; then it gives no sign of life until it goes on.
        on_end: called once on this thread when the group has ended.
        lost: returns why a rank is lost, if that is known in another way, such as by its exit code.
    """

    __slots__ = (
        "_counting", "_has_begun", "_limit", "_loading_limit", "_lost", "_num_awaited", "_on_end", "_rank", "_segment",
        "_stands_still", "_stopping", "_thread",
    )  # fmt: skip

    def __init__(
        self,
        segment: Segment,
        rank: int,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        loading_s: float = LOADING_HEARTBEAT_S,
        stands_still: Callable[[], bool] = lambda: False,
        on_end: Callable[[], None],
        lost: Callable[[], tuple[int, str] | None] = lambda: None,
    ) -> None:
        self._segment = segment
        self._rank = rank
        self._limit = max(2, round(heartbeat_s / BEAT_S))
        self._loading_limit = max(2, round(loading_s / BEAT_S))
        self._stands_still = stands_still
        self._on_end = on_end
        self._lost = lost
        self._has_begun = threading.Event()
        """Set when all ranks are ready; before that, a rank that loads a model may be silent for longer."""
        self._num_awaited = 0
        """Callers that wait for answers of other ranks."""  # written by: awaiting
        self._counting = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Note that all ranks are ready."""
        self._has_begun.set()

    @contextmanager
    def awaiting(self) -> Generator[None]:
        """Let silence count as long as the context lasts, on any thread."""
        with self._counting:
            self._num_awaited += 1
        try:
            yield
        finally:
            with self._counting:
                self._num_awaited -= 1

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        segment, count = self._segment, self._segment.count
        seen, since = [0] * count, [0] * count
        progress, stuck = -1, 0
        while not self._stopping.wait(BEAT_S):
            has_begun = self._has_begun.is_set()
            if has_begun or not self._stands_still():
                segment.beats[self._rank, 0] += 1
            if (found := self._lost()) is not None:
                segment.end(*found)
            is_busy = bool(segment.launched[:, 0].max() > segment.steps[:, 0].min())
            counts = is_busy or not has_begun or self._num_awaited > 0
            beats: list[int] = segment.beats[:, 0].tolist()
            since = [num + 1 if counts and one == old else 0 for num, one, old in zip(since, beats, seen, strict=True)]
            seen = beats
            for rank, num in enumerate(since):
                if rank != self._rank and num > (self._limit if has_begun else self._loading_limit):
                    segment.end(rank, f"rank {rank} has given no sign of life for {num * BEAT_S:.1f} s")
            if has_begun:
                now = int(segment.steps[:, 0].sum() + segment.launched[:, 0].sum() + segment.arrivals.sum())
                stuck = stuck + 1 if now == progress else 0
                progress = now
                if stuck > self._limit and (behind := _behind(segment)) is not None:
                    segment.end(behind, f"rank {behind} does not take part in a step that other ranks have computed")
            if segment.ended[0] != 0:
                self._on_end()
                return


def _behind(segment: Segment) -> int | None:
    """Return a rank that has launched or ended fewer steps than another one, or None."""
    for counts in (segment.launched[:, 0].tolist(), segment.steps[:, 0].tolist()):
        if min(counts) != max(counts):
            return counts.index(min(counts))
    return None
