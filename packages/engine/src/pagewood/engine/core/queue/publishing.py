"""Requests with which another engine goes on: their last answer says that the KV of their prompt is there for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pagewood.engine.api import Delta, FinishReason
from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.request import Request

PUBLISH_WAIT_S = 10.0
"""Longest time for which an answer waits for its pages to be stored; what is missing then is computed again."""
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class StoredPages(Protocol):
    """Says which pages are on their way to tiers that other engines may use; see `memory.caches.SharedCache`."""

    def keys_of(self, tokens: Int32, namespace: Key = None) -> list[bytes]:
        """Return the keys of the whole pages of these tokens."""
        ...

    def unstored(self) -> set[bytes]:
        """Return the keys of the pages that are on their way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The last answer of a request."""

    delta: Delta
    keys: list[bytes]
    """Keys of the pages that must be stored first."""
    until_s: float


class Publishing:
    """Keeps last answers back until the pages of their prompts have left for the shared cache.

    Invariant: each answer that is kept back is returned once, after `PUBLISH_WAIT_S` at the latest. A copy that has
    failed is not waited for.

    Args:
        cache: returns the current cache; None: it cannot say what is stored, and nothing is kept back.
        clock: the engine's.
    """

    __slots__ = ("_cache", "_clock", "_held", "_requests")

    def __init__(self, cache: Callable[[], StoredPages | None], clock: Callable[[], float]) -> None:
        self._cache = cache
        self._clock = clock
        self._requests: dict[str, Request] = {}
        """Those whose last answer has not been made."""  # written by: add, pass_on
        self._held: list[_Held] = []  # written by: pass_on, ready, drop

    @property
    def is_active(self) -> bool:
        """Whether there is a request whose last answer is to be kept back."""
        return bool(self._requests)

    @property
    def is_holding(self) -> bool:
        """Whether an answer is kept back."""
        return bool(self._held)

    def add(self, request: Request) -> None:
        """Keep the last answer of a request back, when it comes."""
        self._requests[request.request_id] = request

    def pass_on(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the answers that can be sent now; keep the others."""
        passed: list[Delta] = []
        cache = self._cache()
        for delta in deltas:
            request = None if delta.finish is None else self._requests.pop(delta.request_id, None)
            if request is None or delta.finish not in _ENDS or cache is None:
                passed.append(delta)
                continue
            keys = cache.keys_of(request.cached_ids(0, request.num_prompt), request.key)
            self._held.append(_Held(delta=delta, keys=keys, until_s=self._clock() + PUBLISH_WAIT_S))
        return passed

    def ready(self) -> list[Delta]:
        """Return the answers that need not wait any longer."""
        cache, now_s = self._cache(), self._clock()
        unstored = set[bytes]() if cache is None else cache.unstored()
        held, self._held = self._held, []
        done: list[Delta] = []
        for one in held:
            if now_s < one.until_s and not unstored.isdisjoint(one.keys):
                self._held.append(one)
            else:
                done.append(one.delta)
        return done

    def drop(self) -> list[Delta]:
        """Return all answers that are kept back, because the engine ends."""
        held, self._held = self._held, []
        return [one.delta for one in held]
