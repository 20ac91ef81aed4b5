"""The history of evicted runs: what was cached before, kept as a forest of ghosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pagewood.radixcache.arrays import ITEM_BYTES, from_bytes, num_common_items
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Space

_GhostTable: TypeAlias = "dict[Any, dict[bytes, Ghost]]"
"""Ghosts by anchor (what they follow), then by the bytes of their first page."""


@dataclass(slots=True, eq=False)
class Ghost:
    """An evicted run, and the ghosts that follow it.

    Invariant: while it is remembered, `table[anchor][first page of key]` is this ghost; afterwards `table` is None.

    Attributes:
        key: the token ids of the run, as int32 bytes.
        evicted_at_s: time of the eviction, in seconds of the cache's clock.
        cause: the name of the policy that evicted it, `"clear"` or `"release"`.
        followers: the ghosts that follow this one, by the number of its pages that precede them.
        table: the table that contains this ghost.
        anchor: what the ghost follows: the key of `table` under which it is found.
    """

    key: bytes = field(repr=False)
    evicted_at_s: float
    cause: str
    followers: _GhostTable = field(default_factory=dict[Any, "dict[bytes, Ghost]"], repr=False)  # written by: History
    table: _GhostTable | None = field(default=None, repr=False)  # written by: History
    anchor: int | Namespace = field(default=None, repr=False)  # written by: History


class History:
    """The ghosts, at most `max_tokens` tokens in total; the oldest is forgotten first, with everything that follows it.

    Invariant: a ghost is anchored at a cached page (by its id), at a namespace (by its name), or at a page of another
    ghost (by the number of pages of that ghost up to and including it). Nothing that is cached is a ghost.

    Attributes:
        cause: the `Ghost.cause` of the pages that are removed next.
    """

    __slots__ = ("_clock", "_max_tokens", "_num_tokens", "_page_bytes", "_queue", "_roots", "cause")

    def __init__(self, max_tokens: int, *, page_size: int, clock: Callable[[], float]) -> None:
        self._max_tokens = max_tokens
        self._page_bytes = page_size * ITEM_BYTES
        self._clock = clock
        self._roots: _GhostTable = {}  # written by: removed, _link, _unlink
        self._queue: deque[Ghost] = deque()  # written by: _remember, _forget_oldest
        self._num_tokens = 0  # written by: _remember, _drop
        self.cause = ""  # written by: RadixCache

    @property
    def num_tokens(self) -> int:
        """Number of tokens remembered."""
        return self._num_tokens

    def find(self, place: int | Namespace, rest: bytes) -> tuple[Ghost | None, int]:
        """Return the ghost at `place` that `rest` starts with, and how many pages of `rest` were cached.

        Args:
            place: page id of the last cached page of the sequence, or the namespace if no page is cached.
            rest: the tokens after that page, as int32 bytes, whole pages.
        """
        table, anchor, num_pages = self._roots, place, 0
        first: Ghost | None = None
        while (ghost := table.get(anchor, {}).get(rest[: self._page_bytes])) is not None:
            first = first or ghost
            anchor = num_common_items(ghost.key, rest, 0) * ITEM_BYTES // self._page_bytes
            num_pages += anchor
            rest = rest[anchor * self._page_bytes :]
            table = ghost.followers
        return first, num_pages

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Take cached pages out of the history, and anchor the ghosts that followed them at the cached pages."""
        place = space.name if parent_page is None else parent_page
        ghost = self._roots.get(place, {}).get(key[: self._page_bytes])
        if ghost is None:
            return
        pages, offset = from_bytes([values]).tolist(), 0
        while ghost is not None:
            self._unlink(ghost)
            self._drop(ghost)
            num_pages = num_common_items(ghost.key, key, offset) * ITEM_BYTES // self._page_bytes
            rest = ghost.key[num_pages * self._page_bytes :]
            remainder = Ghost(rest, ghost.evicted_at_s, ghost.cause) if rest else None
            for anchor, followers in ghost.followers.items():
                for follower in list(followers.values()):
                    if anchor > num_pages:
                        assert remainder is not None  # a follower is anchored at a page of the ghost
                        self._link(follower, remainder.followers, anchor - num_pages)
                    else:
                        self._link(follower, self._roots, pages[offset // self._page_bytes + anchor - 1])
            offset += num_pages * self._page_bytes
            last = pages[offset // self._page_bytes - 1]
            if remainder is not None:
                self._link(remainder, self._roots, last)
                self._remember(remainder)
            ghost = (
                self._roots.get(last, {}).get(key[offset : offset + self._page_bytes]) if offset < len(key) else None
            )

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Remember removed pages as a ghost, and anchor the ghosts that followed these pages at it."""
        ghost = Ghost(key, self._clock(), self.cause)
        pages = from_bytes([values]).tolist()
        if not self._roots.keys().isdisjoint(pages):
            for index, page in enumerate(pages):
                for follower in list(self._roots.get(page, {}).values()):
                    self._unlink(follower)
                    self._link(follower, ghost.followers, index + 1)
        self._link(ghost, self._roots, space.name if parent_page is None else parent_page)
        self._remember(ghost)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def cleared(self, space: Space) -> None:
        """Do nothing: `removed` was called for each page."""

    def check(self) -> None:
        """Raise AssertionError unless every ghost is found at its anchor, and the token count is right and allowed."""
        num_tokens, stack = 0, [self._roots]
        while stack:
            table = stack.pop()
            for anchor, ghosts in table.items():
                for first_page, ghost in ghosts.items():
                    if ghost.table is not table or ghost.anchor != anchor or not ghost.key.startswith(first_page):
                        raise AssertionError(f"a ghost must be found at its anchor: {ghost!r}")
                    num_tokens += len(ghost.key) // ITEM_BYTES
                    stack.append(ghost.followers)
        if not num_tokens == self._num_tokens <= self._max_tokens:
            raise AssertionError(
                f"num_tokens must be {num_tokens}, as counted, and <= {self._max_tokens}, got {self._num_tokens}"
            )

    def _remember(self, ghost: Ghost) -> None:
        self._queue.append(ghost)
        self._num_tokens += len(ghost.key) // ITEM_BYTES
        if len(self._queue) > 64 + 2 * self._num_tokens * ITEM_BYTES // self._page_bytes:  # most are forgotten
            self._queue = deque(each for each in self._queue if each.table is not None)

    def _forget_oldest(self) -> None:
        ghost = self._queue.popleft()
        if ghost.table is None:
            return
        self._unlink(ghost)
        stack = [ghost]
        while stack:
            each = stack.pop()
            each.table = None
            self._drop(each)
            stack.extend(follower for followers in each.followers.values() for follower in followers.values())

    def _drop(self, ghost: Ghost) -> None:
        self._num_tokens -= len(ghost.key) // ITEM_BYTES

    def _link(self, ghost: Ghost, table: _GhostTable, anchor: int | Namespace) -> None:
        table.setdefault(anchor, {})[ghost.key[: self._page_bytes]] = ghost
        ghost.table, ghost.anchor = table, anchor

    def _unlink(self, ghost: Ghost) -> None:
        assert ghost.table is not None  # it is remembered
        ghosts = ghost.table[ghost.anchor]
        del ghosts[ghost.key[: self._page_bytes]]
        if not ghosts:
            del ghost.table[ghost.anchor]
        ghost.table = None
