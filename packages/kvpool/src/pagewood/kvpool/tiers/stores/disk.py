"""The disk tier: pages in one file, which the process finds again when it restarts."""

import itertools
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one, require_whole
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import check_sizes
from pagewood.kvpool.tiers.stores.copier import PageCopier, Place
from pagewood.kvpool.tiers.stores.page_file import ENTRY, PageFile

_MAX_SEQUENCE = 2**62
"""No file reaches this number; larger numbers mean damage."""


class DiskTier:
    """A `PageStore` in a file of fixed size; the least recently used pages are dropped first.

    Invariant: a slot is free, or is being written, or holds the page of exactly one key. A slot that is being read is
    not written. The index is in memory, and is rebuilt from the file's table when the file is opened.

    One file belongs to one process: give each shard (tensor-parallel rank) its own. Processes that want to share pages
    use a `SharedFolder`. The file is never synced, so a crash of the machine may lose the pages of the last seconds. A
    torn page, found at the start or later, counts as absent. Thread-safe.
    """

    __slots__ = ("_changed", "_copier", "_file", "_free", "_held", "_lock", "_num_reads", "_sequence")

    def __init__(
        self,
        path: str | Path,
        *,
        page_bytes: int,
        num_bytes: int,
        fingerprint: bytes = b"",
        sets_aside: bool = False,
    ) -> None:
        """Open the file, or create it.

        Args:
            path: Path of the file.
            page_bytes: Size of a page image, in bytes.
            num_bytes: Largest total size of the pages, in bytes.
            fingerprint: Up to 32 bytes that identify the content of pages: model, dtype, layout.
            sets_aside: Whether a file of another kind, for instance a damaged one, is renamed instead of refused:
                ".aside" is appended to its name.

        Raises:
            ValueError: A size is not an integer >= 1, `num_bytes` is less than one page, `fingerprint` is too long, or
                the file cannot be opened or created; see `PageFile`.
        """
        check_at_least_one(page_bytes=page_bytes)
        if require_whole("num_bytes", num_bytes) < page_bytes:
            raise ValueError(f"num_bytes must hold at least one page of {page_bytes} bytes, got {num_bytes}")
        if len(fingerprint) > 32:
            raise ValueError(f"fingerprint must have at most 32 bytes, got {len(fingerprint)}")
        num_slots = num_bytes // page_bytes
        self._file = PageFile(
            Path(path), page_bytes=page_bytes, num_slots=num_slots, fingerprint=fingerprint, sets_aside=sets_aside
        )
        self._lock = Lock()
        self._copier = PageCopier("kv-disk")
        # Slot and checksum by key, least recently used first.
        self._held: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        # _held is written by: _take, _put_run, _begin_read, _end_read
        # Keys of pages that were added or dropped, if they are tracked.
        self._changed: deque[bytes] | None = None  # written by: track, _take, _put_run, _end_read
        # Number of reads under way, by slot.
        self._num_reads: dict[int, int] = {}  # written by: _begin_read, _end_read
        entries = self._file.entries()
        entries["sequence"][entries["sequence"] > _MAX_SEQUENCE] = 0  # damaged
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
        """Number of pages that fit."""
        return self._file.num_slots

    @property
    def num_held(self) -> int:
        """Number of pages that the file holds."""
        return len(self._held)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages; the least recently used pages make room.

        Raises:
            OSError: The disk is full or failed.
            ValueError: A page or a key has the wrong size. Nothing is stored.
        """
        check_sizes(keys, pages, self._file.page_bytes)
        with self._lock:
            missing = [index for index, key in enumerate(keys) if key not in self._held]
            slots = self._take(len(missing))
        work = list(zip(slots, missing, strict=False))
        for _, group in itertools.groupby(enumerate(work), lambda item: item[1][0] - item[0]):
            run = [item[1] for item in group]
            try:
                self._put_run(run[0][0], [keys[index] for _, index in run], [pages[index] for _, index in run])
            except BaseException:
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
        """Return which pages the file holds, without reading them."""
        return [key in self._held for key in keys]

    def __contains__(self, key: bytes) -> bool:
        """Return whether the file holds a page."""
        return key in self._held

    def track(self) -> deque[bytes]:
        """Return a queue to which the key of every page that is added or dropped is appended from now on."""
        with self._lock:
            if self._changed is None:
                self._changed = deque()
            return self._changed

    def close(self) -> None:
        """Close the file; it can be opened again, in this process or another."""
        self._copier.close()
        self._file.close()

    def _begin_read(self, key: bytes) -> tuple[int, Place] | None:
        """Protect a page's slot from being written; return the slot and the place. The caller holds the lock."""
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        slot, expected = found
        self._num_reads[slot] = self._num_reads.get(slot, 0) + 1
        return slot, Place(file=self._file.descriptor, offset=self._file.offset(slot), key=key, checksum=expected)

    def _end_read(self, slot: int, place: Place, *, is_whole: bool) -> None:
        """Record that a slot was read, and forget its page if it is torn. The caller holds the lock."""
        self._num_reads[slot] -= 1
        if not self._num_reads[slot]:
            del self._num_reads[slot]
        if not is_whole and self._held.get(place.key) == (slot, place.checksum):
            del self._held[place.key]
            self._free.append(slot)
            if self._changed is not None:
                self._changed.append(place.key)

    def _take(self, n: int) -> list[int]:
        """Take up to n slots to write to, ascending. The caller holds the lock."""
        if len(self._free) < n:
            idle = ((key, slot) for key, (slot, _) in self._held.items() if slot not in self._num_reads)
            for key, slot in list(itertools.islice(idle, n - len(self._free))):
                del self._held[key]
                self._free.append(slot)
                if self._changed is not None:
                    self._changed.append(key)
        start = max(0, len(self._free) - n)
        slots = sorted(self._free[start:])
        del self._free[start:]
        return slots

    def _put_run(self, slot: int, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Write pages to consecutive slots that were taken, then add them to the index."""
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
                if key in self._held:  # another thread has stored it in the meantime
                    self._free.append(slot + index)
                else:
                    self._held[key] = (slot + index, checksums[index])
                    if self._changed is not None:
                        self._changed.append(key)
