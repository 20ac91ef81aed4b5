"""The host tier: page images in main memory; the least recently used pages are dropped first."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes, page_aligned_zeros


class HostTier:
    """Page images by key, in one block of memory.

    Invariant: a slot is free, or is taken by a caller that fills it, or holds the page of exactly one key. A pinned
    slot keeps its page.

    A page image is the concatenation of a page's parts in all layers, so a store can read and write it in one run. One
    thread uses the index. Workers read and write `memory` only at slots that are taken or pinned for them.

    Attributes:
        memory: `[num_pages, page_bytes] uint8`.
    """

    __slots__ = ("_changed", "_free", "_keys", "_pins", "_slots", "_unpinned", "memory")

    def __init__(self, *, page_bytes: int, num_pages: int, memory: Bytes | None = None) -> None:
        """Create an empty tier.

        Args:
            page_bytes: Size of one page over all layers, in bytes.
            num_pages: Number of slots.
            memory: `[num_pages, page_bytes] uint8` to use, such as pinned memory. If None, memory is allocated, which
                takes space only as it fills.

        Raises:
            ValueError: `page_bytes` or `num_pages` is not an integer >= 1, or `memory` has another shape or dtype.
        """
        check_at_least_one(page_bytes=page_bytes, num_pages=num_pages)
        shape = (num_pages, page_bytes)
        if memory is not None and (memory.shape != shape or memory.dtype != np.uint8):
            raise ValueError(f"memory must be uint8 of shape {shape}, got {memory.dtype} of shape {memory.shape}")
        self.memory = page_aligned_zeros(*shape) if memory is None else memory
        """`[num_pages, page_bytes] uint8`."""
        self._free = list(range(num_pages - 1, -1, -1))  # written by: take, give_back
        self._slots: dict[bytes, int] = {}  # written by: take, put
        self._keys: list[bytes | None] = [None] * num_pages  # written by: take, put
        self._pins = [0] * num_pages  # written by: pin, unpin
        # Keys of the pages that are not pinned, least recently used first.
        self._unpinned: OrderedDict[bytes, None] = OrderedDict()  # written by: take, put, touch, pin, unpin
        # Keys of pages that were added or dropped, if they are tracked.
        self._changed: deque[bytes] | None = None  # written by: track, take, put

    @property
    def num_pages(self) -> int:
        """Number of slots."""
        return len(self._pins)

    @property
    def page_bytes(self) -> int:
        """Size of one page, in bytes."""
        return self.memory.shape[1]

    @property
    def num_held(self) -> int:
        """Number of pages that it holds."""
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        """Number of pages that it holds and must keep."""
        return len(self._slots) - len(self._unpinned)

    @property
    def num_taken(self) -> int:
        """Number of slots that are being filled."""
        return self.num_pages - len(self._free) - len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        """Return whether it holds the page."""
        return key in self._slots

    def track(self) -> deque[bytes]:
        """Return a queue to which the key of every page that is added or dropped is appended from now on."""
        if self._changed is None:
            self._changed = deque()
        return self._changed

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot of a page, or None if it does not hold the page."""
        return self._slots.get(key)

    def row(self, slot: int) -> Bytes:
        """Return a view of the memory of one slot, `[page_bytes] uint8`."""
        return self.memory[slot]

    def take(self, n: int) -> list[int]:
        """Take up to `n` slots to fill; the least recently used pages that are not pinned make room.

        Returns:
            Slots, ascending; fewer than `n` if all others are pinned or taken. Pass each of them to `put` or
            `give_back`.
        """
        while len(self._free) < n and self._unpinned:
            key, _ = self._unpinned.popitem(last=False)
            slot = self._slots.pop(key)
            self._keys[slot] = None
            self._free.append(slot)
            if self._changed is not None:
                self._changed.append(key)
        start = max(0, len(self._free) - n)
        slots = sorted(self._free[start:])
        del self._free[start:]
        return slots

    def clear(self) -> None:
        """Drop the pages that are not pinned."""
        self.give_back(self.take(self.num_pages))

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that were taken."""
        self._free.extend(sorted(slots, reverse=True))

    def put(self, key: bytes, slot: int) -> bool:
        """Hold the page in a slot that was taken and filled.

        Returns:
            False if the page was already held; then the slot is free again.
        """
        if key in self._slots:
            self.give_back((slot,))
            return False
        self._slots[key] = slot
        self._keys[slot] = key
        self._unpinned[key] = None
        if self._changed is not None:
            self._changed.append(key)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a use of a prefix's pages. Its last page is dropped first, because it is useless without the others.

        Args:
            keys: Keys of consecutive pages; keys that it does not hold are ignored.
        """
        for key in reversed(keys):
            if key in self._unpinned:
                self._unpinned.move_to_end(key)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the pages of these slots until each has been unpinned as often as it was pinned."""
        for slot in slots:
            key = self._keys[slot]
            assert key is not None, f"slot {slot} holds no page"
            self._pins[slot] += 1
            self._unpinned.pop(key, None)

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo one `pin`; this counts as a use of the prefix."""
        for slot in reversed(slots):
            key = self._keys[slot]
            assert key is not None
            assert self._pins[slot] > 0, f"slot {slot} is not pinned"
            self._pins[slot] -= 1
            if not self._pins[slot]:
                self._unpinned[key] = None
