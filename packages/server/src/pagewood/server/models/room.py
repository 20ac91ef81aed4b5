"""Which of several models are loaded and unloaded next, from the requests that wait, their use and their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagewood.server.http.errors import ApiError
from pagewood.server.models.errors import insufficient
from pagewood.server.models.lifecycle import Lifecycle, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The room for models that are loaded at the same time."""

    memory_bytes: int
    max_loaded: int
    """0: any number."""

    def due(self, models: Sequence[Lifecycle], now_s: float) -> Iterator[tuple[Lifecycle, ApiError | None]]:
        """Yield models to load now, and models that can never be loaded, with the error of their requests.

        Models that are to be unloaded get a reason (`leaving`). Which ones leave for memory or because they are idle is
        decided anew each time: a request that has gone needs no room. The caller begins a load before it goes on.
        """
        for one in models:
            if one.leaving in ("memory", "idle"):
                one.leaving = None
            if one.is_idle(now_s):
                one.leaving = "idle"
        for one in sorted((one for one in models if one.is_wanted), key=lambda one: one.waiters[0].number):
            error = self._refusal_of(one, models)
            if error is None and not self._make_room(one, models):
                return  # those behind it wait, too
            yield one, error

    def _refusal_of(self, one: Lifecycle, models: Sequence[Lifecycle]) -> ApiError | None:
        """Return why a model can never be loaded beside those that are pinned; None: it can."""
        pinned = [other for other in models if other.is_pinned and other is not one]
        num_bytes = sum(other.need_bytes for other in pinned)
        if one.need_bytes + num_bytes > self.memory_bytes:
            kept = f", of which pinned models take {gb(num_bytes)}" if pinned else ""
            return insufficient(
                f"The model '{one.name}' needs {gb(one.need_bytes)} of memory, and this server has "
                f"{gb(self.memory_bytes)} for models{kept}. Lower --max-total-tokens, choose a smaller --weights, or "
                "raise --models-memory-gb."
            )
        if 0 < self.max_loaded <= len(pinned):
            return insufficient(
                f"The model '{one.name}' cannot be loaded: --models-max is {self.max_loaded}, and as many are pinned."
            )
        return None

    def _make_room(self, one: Lifecycle, models: Sequence[Lifecycle]) -> bool:
        """Return whether there is room for a model; otherwise mark models that leave for it."""
        others = [other for other in models if other.phase is not Phase.UNLOADED]
        if self._fits(one, others):
            return True
        staying = [other for other in others if other.phase is not Phase.ENDING and other.leaving is None]
        leaving: list[Lifecycle] = []
        for other in sorted(staying, key=lambda other: (other.num_uses > 0, other.last_used_s)):
            if self._fits(one, staying):
                break
            if other.phase is Phase.LOADED and not other.is_pinned:
                leaving.append(other)
                staying.remove(other)
        if self._fits(one, staying):  # otherwise a model that is loading now is in the way
            for other in leaving:
                other.leaving = "memory"
        return False

    def _fits(self, one: Lifecycle, others: Sequence[Lifecycle]) -> bool:
        num_bytes = one.need_bytes + sum(other.need_bytes for other in others)
        return num_bytes <= self.memory_bytes and not 0 < self.max_loaded <= len(others)


def gb(num_bytes: int) -> str:
    """Return bytes in words."""
    return f"{num_bytes / 1e9:.2f} GB"
