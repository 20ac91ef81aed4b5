"""The disk tier: pages in one file of this process, found again when it starts the next time."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.copier import PageCopier, Place
from pagewood.kvpool.tiers.page_file import ENTRY, PageFile


class DiskTier:
    """A `PageStore` in a file of fixed size, least recently used out first.

    Invariant: a slot is free, or being written, or holds the page of exactly one key; a slot that is being read is not
    written. The index lives in memory, and is rebuilt from the file's table when it is opened.

    One file belongs to one process: give each shard (tensor-parallel rank) its own. Processes that want to share pages
    use a `SharedFolder`. Nothing is synced, so a crash of the machine may cost the pages of its last seconds; what is
    found torn, then or later, is absent. Thread-safe.

    Args:
        path: of the file.
        page_bytes: of a page image.
        num_bytes: how large the pages may be together.
        fingerprint: up to 32 bytes that say what the pages are of: model, dtype, layout.

    Raises:
        ValueError: `num_bytes` is less than one page, `fingerprint` is too long, or the file cannot be had.
    """

    __slots__ = ("_copier", "_file", "_free", "_held", "_lock", "_num_reads", "_sequence")

    def __init__(self, path: str | Path, *, page_bytes: int, num_bytes: int, fingerprint: bytes = b"") -> None:
        if page_bytes < 1:
            raise ValueError(f"page_bytes must be >= 1, got {page_bytes}")
        if num_bytes < page_bytes:
            raise ValueError(f"num_bytes must hold at least one page of {page_bytes} bytes, got {num_bytes}")
        if len(fingerprint) > 32:
            raise ValueError(f"fingerprint must have at most 32 bytes, got {len(fingerprint)}")
        num_slots = num_bytes // page_bytes
        self._file = PageFile(Path(path), page_bytes=page_bytes, num_slots=num_slots, fingerprint=fingerprint)
        self._lock = Lock()
        self._copier = PageCopier("kv-disk")
        self._held: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """Slot and checksum by key, least recently used first."""
        # _held is written by: _take, _put_run, _begin_read, _end_read
        self._num_reads: dict[int, int] = {}  # by slot that is being read; written by: _begin_read, _end_read
        entries = self._file.entries()
        self._sequence = int(entries["sequence"].max())  # written by: _put_run
        for slot in np.argsort(entries["sequence"], kind="stable").tolist():
            if entries["sequence"][slot]:
                self._held.pop(key := entries["key"][slot].tobytes(), None)
                self._held[key] = (slot, entries["checksum"][slot].tobytes())
        in_use = {slot for slot, _ in self._held.values()}
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in in_use]
        # _free is written by: put, _take, _put_run, _end_read

    @property
    def num_pages(self) -> int:
        """Pages that fit."""
        return self._file.num_slots

    @property
    def num_held(self) -> int:
        """Pages that it has."""
        return len(self._held)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Keep pages, at the cost of the least recently used ones.

        Raises:
            OSError: the disk is full or failed.
            ValueError: a page has another size.
        """
        for page in pages:
            if page.nbytes != self._file.page_bytes:
                raise ValueError(f"pages must have {self._file.page_bytes} bytes, got {page.nbytes}")
        with self._lock:
            lacking = [index for index, key in enumerate(keys) if key not in self._held]
            slots = self._take(len(lacking))
        work = list(zip(slots, lacking, strict=False))
        for _, group in itertools.groupby(enumerate(work), lambda item: item[1][0] - item[0]):
            run = [item[1] for item in group]
            try:
                self._put_run(run[0][0], [keys[index] for _, index in run], [pages[index] for _, index in run])
            except OSError:
                with self._lock:
                    self._free.extend(slot for slot, _ in reversed(work) if slot >= run[0][0])
                raise

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Read and verify pages; a page that is torn or cannot be read is forgotten."""
        with self._lock:
            reads = [(index, *read) for index, key in enumerate(keys) if (read := self._begin_read(key)) is not None]
        is_whole = self._copier.read([place for _, _, place in reads], [pages[index] for index, _, _ in reads])
        answer = [False] * len(keys)
        with self._lock:
            for (index, slot, place), is_good in zip(reads, is_whole, strict=True):
                self._end_read(slot, place, is_whole=is_good)
                answer[index] = is_good
        return answer

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages it has, without reading them."""
        return [key in self._held for key in keys]

    def close(self) -> None:
        """Close the file; it can be opened again, here or in another process."""
        self._copier.close()
        self._file.close()

    def _begin_read(self, key: bytes) -> tuple[int, Place] | None:
        """Keep a page's slot from being written, and return it and the place; the lock is held."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        slot, expected = found
        self._num_reads[slot] = self._num_reads.get(slot, 0) + 1
        return slot, Place(file=self._file.descriptor, offset=self._file.offset(slot), key=key, checksum=expected)

    def _end_read(self, slot: int, place: Place, *, is_whole: bool) -> None:
        """Take note that a slot was read, and forget its page if it is torn; the lock is held."""
        self._num_reads[slot] -= 1
        if not self._num_reads[slot]:
            del self._num_reads[slot]
        if not is_whole and self._held.get(place.key) == (slot, place.checksum):
            del self._held[place.key]
            self._free.append(slot)

    def _take(self, n: int) -> list[int]:
        """Take up to n slots to write to, ascending; the lock is held."""
        if len(self._free) < n:
            idle = ((key, slot) for key, (slot, _) in self._held.items() if slot not in self._num_reads)
            for key, slot in list(itertools.islice(idle, n - len(self._free))):
                del self._held[key]
                self._free.append(slot)
        start = max(0, len(self._free) - n)
        slots = sorted(self._free[start:])
        del self._free[start:]
        return slots

    def _put_run(self, slot: int, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Write pages to consecutive taken slots, then hold them."""
        checksums = self._copier.write(self._file.descriptor, self._file.offset(slot), keys, pages)
        entries = np.zeros(len(keys), ENTRY)
        entries["key"] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        entries["checksum"] = np.frombuffer(b"".join(checksums), np.uint8).reshape(-1, 16)
        with self._lock:
            entries["sequence"] = np.arange(self._sequence + 1, self._sequence + 1 + len(keys))
            self._sequence += len(keys)
        self._file.write_entries(slot, entries)
        with self._lock:
            for index, key in enumerate(keys):
                if key in self._held:  # another thread was faster
                    self._free.append(slot + index)
                else:
                    self._held[key] = (slot + index, checksums[index])
