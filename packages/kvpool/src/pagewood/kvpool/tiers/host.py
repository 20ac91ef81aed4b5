"""The host tier: page images in main memory, least recently used out first."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from pagewood.kvpool.tiers.arrays import Bytes, page_aligned_zeros


class HostTier:
    """Page images by key in one block of memory.

    Invariant: a slot is free, or taken by somebody who is filling it, or holds the page of exactly one key; a pinned
    slot keeps its page.

    A page image is the parts of all layers one after the other, so that a store reads and writes it in one run. The
    index is used by one thread; workers read and write `memory` at slots that are taken or pinned for them.

    Args:
        page_bytes: of one page over all layers.
        num_pages: slots.
        memory: `[num_pages, page_bytes] uint8` to use, such as pinned memory; None: it is allocated, and costs memory
            only as it fills.

    Raises:
        ValueError: `page_bytes` or `num_pages` is less than 1, or `memory` has another shape.
    """

    __slots__ = ("_free", "_keys", "_pins", "_slots", "_unpinned", "memory")

    def __init__(self, *, page_bytes: int, num_pages: int, memory: Bytes | None = None) -> None:
        for name, value in (("page_bytes", page_bytes), ("num_pages", num_pages)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        shape = (num_pages, page_bytes)
        if memory is not None and (memory.shape != shape or memory.dtype != np.uint8):
            raise ValueError(f"memory must be uint8 of shape {shape}, got {memory.dtype} of shape {memory.shape}")
        self.memory = page_aligned_zeros(*shape) if memory is None else memory
        """`[num_pages, page_bytes] uint8`."""
        self._free = list(range(num_pages - 1, -1, -1))  # written by: take, give_back
        self._slots: dict[bytes, int] = {}  # written by: take, put
        self._keys: list[bytes | None] = [None] * num_pages  # written by: take, put
        self._pins = [0] * num_pages  # written by: pin, unpin
        self._unpinned: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # oldest first; written by: take, put, touch, pin, unpin

    @property
    def num_pages(self) -> int:
        """Slots."""
        return len(self._pins)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.memory.shape[1]

    @property
    def num_held(self) -> int:
        """Pages that it holds."""
        return len(self._slots)

    @property
    def num_pinned(self) -> int:
        """Pages that it holds and that must stay."""
        return len(self._slots) - len(self._unpinned)

    @property
    def num_taken(self) -> int:
        """Slots that somebody is filling."""
        return self.num_pages - len(self._free) - len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        """Whether it holds the page."""
        return key in self._slots

    def slot_of(self, key: bytes) -> int | None:
        """Return where the page lies; None: it does not hold it."""
        return self._slots.get(key)

    def row(self, slot: int) -> Bytes:
        """Return `[page_bytes] uint8`, the memory of one slot, not a copy."""
        return self.memory[slot]

    def take(self, n: int) -> list[int]:
        """Take slots to fill, at the cost of the least recently used pages that are not pinned.

        Returns:
            Up to n slots, ascending; fewer if all others are pinned or taken. Each goes to `put` or `give_back`.
        """
        while len(self._free) < n and self._unpinned:
            key, _ = self._unpinned.popitem(last=False)
            slot = self._slots.pop(key)
            self._keys[slot] = None
            self._free.append(slot)
        start = max(0, len(self._free) - n)
        slots = sorted(self._free[start:])
        del self._free[start:]
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        """Make taken slots free."""
        self._free.extend(sorted(slots, reverse=True))

    def put(self, key: bytes, slot: int) -> bool:
        """Hold the page that a taken slot was filled with; False: it was held already, and the slot is free again."""
        if key in self._slots:
            self.give_back((slot,))
            return False
        self._slots[key] = slot
        self._keys[slot] = key
        self._unpinned[key] = None
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count a prefix's pages as used; the last of them is the first to go, because it is no use without the others.

        Args:
            keys: of pages that follow each other; those that it does not hold are ignored.
        """
        for key in reversed(keys):
            if key in self._unpinned:
                self._unpinned.move_to_end(key)

    def pin(self, slots: Iterable[int]) -> None:
        """Keep the pages of these slots until they are unpinned as often."""
        for slot in slots:
            key = self._keys[slot]
            assert key is not None, f"slot {slot} holds no page"
            self._pins[slot] += 1
            self._unpinned.pop(key, None)

    def unpin(self, slots: Sequence[int]) -> None:
        """Undo one `pin`; it counts as a use of the prefix."""
        for slot in reversed(slots):
            key = self._keys[slot]
            assert key is not None
            assert self._pins[slot] > 0, f"slot {slot} is not pinned"
            self._pins[slot] -= 1
            if not self._pins[slot]:
                self._unpinned[key] = None
