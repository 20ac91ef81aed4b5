"""What was cached once: the runs given up lately, each behind the page that it followed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pagewood.radixcache.arrays import ITEM_BYTES, from_bytes, num_common_items
from pagewood.radixcache.node import Space

_Behind: TypeAlias = "dict[Any, dict[bytes, Ghost]]"
"""Ghosts by what they follow, and by their first page."""


@dataclass(slots=True, eq=False)
class Ghost:
    """A run that is cached no more, and those that followed it.

    Invariant: `home[at][first page of key]` is this ghost while it is remembered; `home` is None afterwards.
    """

    key: bytes = field(repr=False)
    evicted_at_s: float
    cause: str
    behind: _Behind = field(default_factory=dict[Any, "dict[bytes, Ghost]"], repr=False)  # written by: History
    home: _Behind | None = field(default=None, repr=False)  # written by: History
    at: int | str | None = field(default=None, repr=False)  # written by: History


class History:
    """The ghosts, at most `max_tokens` tokens of them, the oldest forgotten first with all that followed it.

    Invariant: a ghost hangs behind a cached page (by its id), a namespace (by its name), or a page of another ghost (by
    how many pages of that precede it); what is cached is no ghost.
    """

    __slots__ = ("_behind", "_clock", "_max_tokens", "_num_tokens", "_page_bytes", "_queue", "cause")

    def __init__(self, max_tokens: int, *, page_size: int, clock: Callable[[], float]) -> None:
        self._max_tokens = max_tokens
        self._page_bytes = page_size * ITEM_BYTES
        self._clock = clock
        self._behind: _Behind = {}  # written by: removed, _hang, _unhang
        self._queue: deque[Ghost] = deque()  # written by: _remember, _forget_oldest
        self._num_tokens = 0  # written by: _remember, _drop
        self.cause = ""  # written by: RadixCache; why pages are being removed now

    @property
    def num_tokens(self) -> int:
        """Tokens remembered."""
        return self._num_tokens

    def find(self, place: int | str | None, rest: bytes) -> tuple[Ghost | None, int]:
        """Return the ghost that `rest` goes on with behind a place, and how many of its pages were cached once."""
        behind, at, num_pages = self._behind, place, 0
        first: Ghost | None = None
        while (ghost := behind.get(at, {}).get(rest[: self._page_bytes])) is not None:
            first = first or ghost
            at = num_common_items(ghost.key, rest, 0) * ITEM_BYTES // self._page_bytes
            num_pages += at
            rest = rest[at * self._page_bytes :]
            behind = ghost.behind
        return first, num_pages

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Pages are cached again, or for the first time: they are no ghosts, and what followed them follows them."""
        place = space.name if parent_page is None else parent_page
        ghost = self._behind.get(place, {}).get(key[: self._page_bytes])
        if ghost is None:
            return
        pages, offset = from_bytes([values]).tolist(), 0
        while ghost is not None:
            self._unhang(ghost)
            self._drop(ghost)
            num_pages = num_common_items(ghost.key, key, offset) * ITEM_BYTES // self._page_bytes
            rest = ghost.key[num_pages * self._page_bytes :]
            remainder = Ghost(rest, ghost.evicted_at_s, ghost.cause) if rest else None
            for at, followers in ghost.behind.items():
                for follower in list(followers.values()):
                    if at > num_pages:
                        assert remainder is not None  # followers are behind pages of the ghost
                        self._hang(follower, remainder.behind, at - num_pages)
                    else:
                        self._hang(follower, self._behind, pages[offset // self._page_bytes + at - 1])
            offset += num_pages * self._page_bytes
            last = pages[offset // self._page_bytes - 1]
            if remainder is not None:
                self._hang(remainder, self._behind, last)
                self._remember(remainder)
            ghost = (
                self._behind.get(last, {}).get(key[offset : offset + self._page_bytes]) if offset < len(key) else None
            )

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Pages have become a ghost, and what hung behind them hangs behind it."""
        ghost = Ghost(key, self._clock(), self.cause)
        pages = from_bytes([values]).tolist()
        if not self._behind.keys().isdisjoint(pages):
            for index, page in enumerate(pages):
                for follower in list(self._behind.get(page, {}).values()):
                    self._unhang(follower)
                    self._hang(follower, ghost.behind, index + 1)
        self._hang(ghost, self._behind, space.name if parent_page is None else parent_page)
        self._remember(ghost)
        while self._num_tokens > self._max_tokens:
            self._forget_oldest()

    def cleared(self, space: Space) -> None:
        """Nothing: `removed` has said it."""

    def check(self) -> None:
        """Raise AssertionError unless every ghost knows where it hangs, and the tokens are counted."""
        num_tokens, stack = 0, [self._behind]
        while stack:
            behind = stack.pop()
            for at, ghosts in behind.items():
                for first_page, ghost in ghosts.items():
                    if ghost.home is not behind or ghost.at != at or not ghost.key.startswith(first_page):
                        raise AssertionError(f"a ghost knows where it hangs: {ghost!r}")
                    num_tokens += len(ghost.key) // ITEM_BYTES
                    stack.append(ghost.behind)
        if not num_tokens == self._num_tokens <= self._max_tokens:
            raise AssertionError("the history counts its tokens, and keeps to its limit")

    def _remember(self, ghost: Ghost) -> None:
        self._queue.append(ghost)
        self._num_tokens += len(ghost.key) // ITEM_BYTES
        if len(self._queue) > 64 + 2 * self._num_tokens * ITEM_BYTES // self._page_bytes:  # most are forgotten already
            self._queue = deque(each for each in self._queue if each.home is not None)

    def _forget_oldest(self) -> None:
        ghost = self._queue.popleft()
        if ghost.home is None:
            return
        self._unhang(ghost)
        stack = [ghost]
        while stack:
            each = stack.pop()
            each.home = None
            self._drop(each)
            stack.extend(follower for followers in each.behind.values() for follower in followers.values())

    def _drop(self, ghost: Ghost) -> None:
        self._num_tokens -= len(ghost.key) // ITEM_BYTES

    def _hang(self, ghost: Ghost, home: _Behind, at: int | str | None) -> None:
        home.setdefault(at, {})[ghost.key[: self._page_bytes]] = ghost
        ghost.home, ghost.at = home, at

    def _unhang(self, ghost: Ghost) -> None:
        assert ghost.home is not None  # it is remembered
        ghosts = ghost.home[ghost.at]
        del ghosts[ghost.key[: self._page_bytes]]
        if not ghosts:
            del ghost.home[ghost.at]
        ghost.home = None
