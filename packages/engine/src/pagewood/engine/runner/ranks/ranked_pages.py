"""Pages of ranks in tiers, where rank 0 cannot copy them itself: it says what is copied, and each rank copies.

They are those of other hosts, each of which keeps what its ranks have, and those of other devices of this host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from pagewood.engine.runner.ranks.messages import FromRank, MovePages, PagesMoved, StoreName
from pagewood.kvpool.tiers import PageStore
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages

_log = logging.getLogger(__name__)

_NUM_WORKERS = 5
"""The four lanes of the tiers and the thread of the engine each wait for one copy at a time."""


class MovingGroup(Protocol):
    """The group of a model, as rank 0 uses it to copy pages of other ranks; see `Group`."""

    @property
    def num_here(self) -> int:
        """Ranks of this host."""
        ...

    @property
    def count(self) -> int:
        """All ranks."""
        ...

    def move_pages(self, message: MovePages, own: Callable[[], None], *, ranks: range) -> list[PagesMoved]:
        """Copy here and on other ranks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What a process copies of all pages, where ranks are on several hosts."""

    rank: int
    """The first rank to which it belongs."""
    has_whole_pages: bool
    """Whether these are the pages of its own requests, and not a part of each page."""
    host_page_bytes: int
    """See `Sizes`."""
    num_state_parts: int = 0
    """See `Sizes`."""
    group: MovingGroup | None = None
    """All ranks, if this is rank 0."""


class RankedPages:
    """The KV memory of several ranks, or of another one, as rank 0 uses it; satisfies `DevicePages`. Thread-safe.

    Invariant: a copy ends when all ranks that take part have ended it, so nothing uses its pages and images afterwards.
    It raises OSError if another rank could not copy, and RunnerLostError if a rank is lost.

    Args:
        own: what this process copies meanwhile.
        images: `[n, image]`, the host cache of rank 0; each rank of another host has as many, of its own part, and
            those of this host have the same ones. Or `places_of_images` for that of one rank.
        group: all ranks.
        ranks: which copy; None: all of other hosts.
    """

    __slots__ = ("_group", "_images", "_numbers", "_own", "_ranks", "page_bytes")

    def __init__(self, own: DevicePages, images: Bytes, group: MovingGroup, *, ranks: range | None = None) -> None:
        self._own = own
        self._images = images
        self._group = group
        self._ranks = range(group.num_here, group.count) if ranks is None else ranks
        self._numbers = count()
        self.page_bytes = own.page_bytes
        """Bytes of a page on this host, or of an image where its ranks have the same ones."""

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out."""
        message = MovePages(number=next(self._numbers), is_out=True, slots=[*slots], pages=[*pages])
        self._move(message, lambda: self._own.read(pages, memory, slots))

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, all layers at once."""
        layers: list[int] = []
        message = MovePages(number=next(self._numbers), is_out=False, slots=[*slots], pages=[*pages])
        self._move(message, lambda: self._own.write(pages, memory, slots, layers.append))
        arrived(layers[-1])

    def exchange(
        self, own: Callable[[], None], store: StoreName, keys: Sequence[bytes], rows: Sequence[Bytes], *, is_out: bool
    ) -> list[PagesMoved]:
        """Copy images to or from a store of each host, or ask it for pages; return the answers of other hosts.

        All `ranks` are on other hosts.

        Args:
            own: does so on this host.
            store: which one.
            keys: of the pages.
            rows: `[image]` each, images of the host cache; empty: the store is asked which pages it has.
            is_out: whether to the store.
        """
        first, size = self._images.ctypes.data, self._images.strides[0]
        places = [divmod(row.ctypes.data - first, size) for row in rows]
        assert all(not rest and 0 <= slot < len(self._images) for slot, rest in places), "hosts share no other memory"
        slots = [slot for slot, _ in places]
        message = MovePages(number=next(self._numbers), is_out=is_out, slots=slots, keys=[*keys], store=store)
        return self._move(message, own)

    def _move(self, message: MovePages, own: Callable[[], None]) -> list[PagesMoved]:
        answers = self._group.move_pages(message, own, ranks=self._ranks)
        for rank, one in zip(self._ranks, answers, strict=False):
            if one.error is not None:
                raise OSError(f"rank {rank} could not copy {len(message.slots)} pages: {one.error}")
        return answers


class RankedStore:
    """A store of each host, which has the parts of its ranks; satisfies `PageStore`. Thread-safe.

    Invariant: `get` finds a page if all hosts have their parts. Only this host is asked which pages exist.

    Args:
        own: of this host.
        name: of the store.
        pages: of all hosts.
    """

    __slots__ = ("_name", "_own", "_pages")

    def __init__(self, own: PageStore, name: StoreName, pages: RankedPages) -> None:
        self._own = own
        self._name: StoreName = name
        self._pages = pages

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store all parts of pages."""
        self._pages.exchange(lambda: self._own.put(keys, pages), self._name, keys, pages, is_out=True)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch all parts of pages."""
        found: list[bool] = []
        others = self._pages.exchange(
            lambda: found.extend(self._own.get(keys, pages)), self._name, keys, pages, is_out=False
        )
        return [all(parts) for parts in zip(found, *(one.found for one in others), strict=True)]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages this host has."""
        return self._own.exists(keys)

    def close(self) -> None:
        """Close the store of this host; other ranks close theirs at their end."""
        self._own.close()


class PagesElsewhere:
    """The own part of a copy that another rank makes: nothing; satisfies `DevicePages`.

    Args:
        page_bytes: of a page of that rank.
    """

    __slots__ = ("page_bytes",)

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        """Bytes of a page."""

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy nothing."""

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy nothing."""
        arrived(1)


def places_of_images(num_images: int, page_bytes: int) -> Bytes:
    """Return `[num_images, page_bytes]` for a `HostTier` whose images are on another host: rows with addresses only."""
    return as_strided(np.zeros(num_images, np.uint8), (num_images, page_bytes), (1, 0), writeable=False)


class StoreElsewhere:
    """A store of a rank on another host, as rank 0 uses it; satisfies `PageStore`. Thread-safe.

    `exists` waits for the other host, so it takes as long as a message there and back.

    Args:
        name: of the store.
        pages: of that rank.
    """

    __slots__ = ("_name", "_pages")

    def __init__(self, name: StoreName, pages: RankedPages) -> None:
        self._name: StoreName = name
        self._pages = pages

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages."""
        self._pages.exchange(_nothing, self._name, keys, pages, is_out=True)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages."""
        (answer,) = self._pages.exchange(_nothing, self._name, keys, pages, is_out=False)
        return answer.found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask which pages it has."""
        return self.get(keys, [])

    def close(self) -> None:
        """Do nothing: the rank closes it."""


class FollowedPages:
    """The pages of a rank that rank 0 cannot copy itself.

    Args:
        own: its KV memory.
        images: `[n, image]`, its host cache, or its part of that of its host.
        stores: below it; nothing on the host of rank 0.
        talk: sends messages to rank 0, from any thread.
    """

    __slots__ = ("_images", "_own", "_stores", "_talk", "_workers")

    def __init__(
        self,
        own: DevicePages,
        images: Bytes,
        stores: Mapping[StoreName, PageStore],
        talk: Callable[[FromRank], None],
    ) -> None:
        self._own = own
        self._images = images
        self._stores = stores
        self._talk = talk
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, "kv-pages")

    def move(self, message: MovePages) -> None:
        """Begin to copy, beside the steps and other copies; rank 0 gets an answer."""
        self._workers.submit(self._move, message)

    def close(self) -> None:
        """Finish the copies that have begun, and close the stores."""
        self._workers.shutdown()
        for store in self._stores.values():
            store.close()

    def _move(self, message: MovePages) -> None:
        found: list[bool] = []
        error: str | None = None
        try:
            found = self._moved(message)
        except Exception as cause:  # rank 0 counts the pages as failed
            _log.exception("could not copy %d pages", len(message.slots))
            error = str(cause) or repr(cause)
        with suppress(OSError):  # rank 0 has ended
            self._talk(PagesMoved(number=message.number, found=found, error=error))

    def _moved(self, message: MovePages) -> list[bool]:
        images, slots = self._images, message.slots
        if message.store is None:
            if message.is_out:
                self._own.read(message.pages, images, slots)
            else:
                self._own.write(message.pages, images, slots, _ignore)
            return []
        store, rows = self._stores[message.store], [images[slot] for slot in slots]
        if not message.is_out:
            return store.get(message.keys, rows) if slots else store.exists(message.keys)
        store.put(message.keys, rows)
        return []


def _nothing() -> None:
    """Do nothing."""


def _ignore(num_layers: int) -> None:
    """Note nothing: a page is there when all ranks have all layers."""
