"""A device and a store that fail on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.device import DevicePages
from pagewood.kvpool.tiers.stores.store import PageStore


class FaultyDevice:
    """A device whose next copies fail after half of their pages.

    Attributes:
        num_reads_failing: Number of reads that will copy half of their pages and raise.
        num_writes_failing: Number of writes that will copy half of their pages and raise.
    """

    def __init__(self, device: DevicePages) -> None:
        self._device = device
        self.num_reads_failing = 0
        self.num_writes_failing = 0

    @property
    def page_bytes(self) -> int:
        """Page size of the device."""
        return self._device.page_bytes

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out, or half of them and raise."""
        if self.num_reads_failing:
            self.num_reads_failing -= 1
            half = len(pages) // 2
            self._device.read(pages[:half], memory, slots[:half])
            raise RuntimeError("the device failed to copy out")
        self._device.read(pages, memory, slots)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, or half of them and raise."""
        if self.num_writes_failing:
            self.num_writes_failing -= 1
            half = len(pages) // 2
            self._device.write(pages[:half], memory, slots[:half], lambda n: None)
            raise RuntimeError("the device failed to copy in")
        self._device.write(pages, memory, slots, arrived)


class FaultyStore:
    """A store whose next calls fail after half of their pages.

    Attributes:
        num_puts_failing: Number of puts that will store half of their pages and raise, as on a full disk.
        num_gets_failing: Number of gets that will write garbage and raise.
        num_gets_short: Number of gets that will return the first half only, and write garbage for the other pages.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self.num_puts_failing = 0
        self.num_gets_failing = 0
        self.num_gets_short = 0

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages, or half of them and raise."""
        if self.num_puts_failing:
            self.num_puts_failing -= 1
            half = len(keys) // 2
            self._store.put(keys[:half], pages[:half])
            raise OSError(28, "No space left on device")
        self._store.put(keys, pages)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages, or some of them."""
        if self.num_gets_failing:
            self.num_gets_failing -= 1
            for page in pages:
                page.fill(0xAA)
            raise OSError(5, "Input/output error")
        found = self._store.get(keys, pages)
        if self.num_gets_short:
            self.num_gets_short -= 1
            for index in range(len(keys) // 2, len(keys)):
                pages[index].fill(0xAA)
                found[index] = False
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Query the store."""
        return self._store.exists(keys)

    def close(self) -> None:
        """Close the store."""
        self._store.close()
