"""The queue of the answers to one HTTP request, whose reader may take them on the spot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.requests.unread import Item, Unread

Take = Callable[[int, wire.Answer], bool]
"""Takes an answer at once, with the index of its request; False: it must be queued."""


class AnswerQueue:
    """A queue with one reader. While the reader waits, its `take` may accept answers on the spot.

    Every token passes here. An answer that is taken wakes no task, which would cost more than to write it.
    """

    __slots__ = ("_items", "_reader", "_take")

    def __init__(self) -> None:
        self._items = Unread()
        self._reader: asyncio.Future[None] | None = None
        """Set while the reader waits."""  # written by: _wake, get
        self._take: Take | None = None
        """The function of the reader that waits."""  # written by: _wake, get

    def empty(self) -> bool:
        """Return whether it holds nothing."""
        return not self._items

    def put(self, index: int, answer: wire.Answer) -> bool:
        """Pass an answer to the reader, or append it; return whether the unread answers exceed the limit."""
        if self._take is not None:
            try:
                if self._take(index, answer):
                    return False
            except Exception as error:  # it ends only this reader
                self._append(error)
                return False
        self._append((index, answer))
        return self._items.is_overfull

    def fail(self, error: ApiError) -> None:
        """Append an error."""
        self._append(error)

    def get_nowait(self) -> Item:
        """Return the oldest item; there is one."""
        return self._items.popleft()

    async def get(self, take: Take | None = None) -> Item:
        """Wait for an item, and return the oldest; `take` gets the answers that come meanwhile."""
        while not self._items:
            self._reader, self._take = asyncio.get_running_loop().create_future(), take
            try:
                await self._reader
            finally:
                self._take = None
        return self._items.popleft()

    def _append(self, item: tuple[int, wire.Answer] | Exception) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader, self._take = self._reader, None, None
        if reader is not None and not reader.done():
            reader.set_result(None)
