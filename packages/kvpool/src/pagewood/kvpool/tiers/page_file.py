"""A file of page images at direct offsets, with a table that says what lies where.

| part | bytes | holds |
|---|---|---|
| head | 4,096 | magic, size of a page, number of slots, fingerprint |
| table | 64 per slot, to a whole 4,096 | key (32), checksum (16), sequence number (8), unused (8) |
| pages | page_bytes per slot | page images |

Nothing is ever synced, and a page and its entry are written in any order: whatever a crash leaves behind, an entry
counts only if its checksum is that of the page in the slot. Numbers are little-endian.
"""

import fcntl
import os
import shutil
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.tiers.copier import read_rows, write_rows

ENTRY = np.dtype([("key", "u1", 32), ("checksum", "u1", 16), ("sequence", "<u8"), ("unused", "<u8")])
"""One slot of the table; sequence 0: the slot has never held a page."""

_MAGIC = b"pagewood pages 1"
_HEAD = struct.Struct("<16sQQ32s")
_BLOCK_BYTES = 4096


class PageFile:
    """An open page file, locked against other processes.

    Invariant: it does not know which slots are in use; the caller does, and never lets two calls meet in one slot.

    Args:
        path: of the file; made if it is not there. One of another geometry is emptied.
        page_bytes: of a page image.
        num_slots: slots.
        fingerprint: up to 32 bytes that say what the pages are of. A file of another one is refused.

    Raises:
        ValueError: the file cannot be made or written, is somebody else's, or the disk has no room for it.
    """

    __slots__ = ("_start", "descriptor", "num_slots", "page_bytes", "path")

    def __init__(self, path: Path, *, page_bytes: int, num_slots: int, fingerprint: bytes) -> None:
        self.path = path
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        table_bytes = -(-num_slots * ENTRY.itemsize // _BLOCK_BYTES) * _BLOCK_BYTES
        self._start = _BLOCK_BYTES + table_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"path must be a file that can be made and written, got {path}: {error}") from error
        try:
            self._claim(_HEAD.pack(_MAGIC, page_bytes, num_slots, fingerprint.ljust(32, b"\0")))
        except BaseException:
            os.close(self.descriptor)
            raise

    def entries(self) -> NDArray[np.void]:
        """Read the whole table, `[num_slots] ENTRY`."""
        table = np.zeros(self.num_slots, ENTRY)
        read_rows(self.descriptor, [table.view(np.uint8)], _BLOCK_BYTES)
        return table

    def offset(self, slot: int) -> int:
        """Return where a slot's page begins."""
        return self._start + slot * self.page_bytes

    def write_entries(self, slot: int, entries: NDArray[np.void]) -> None:
        """Write the entries of consecutive slots from `slot` on.

        Raises:
            OSError: the disk is full or failed; any part may have been written.
        """
        write_rows(self.descriptor, [entries.view(np.uint8)], _BLOCK_BYTES + slot * ENTRY.itemsize)

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self.descriptor)

    def _claim(self, head: bytes) -> None:
        """Lock the file, and make it one of this geometry if it is not."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"path must not be in use, got {self.path}, which another process holds (a SharedFolder can be shared)"
            ) from error
        found = os.pread(self.descriptor, _HEAD.size, 0)
        if found == head:
            return
        if found and not found.startswith(_MAGIC):
            raise ValueError(f"path must be a page file or new, got {self.path}, which is something else")
        if found and found[-32:] != head[-32:]:
            raise ValueError(
                f"path must hold pages of the same model and layout, got {self.path}, which holds others: "
                "delete it, or choose another"
            )
        needed = self._start + self.num_slots * self.page_bytes
        os.ftruncate(self.descriptor, 0)
        available = shutil.disk_usage(self.path.parent).free
        if needed > available:
            raise ValueError(f"the disk of {self.path} must have {needed} bytes free, got {available}")
        os.ftruncate(self.descriptor, needed)
        os.pwrite(self.descriptor, head, 0)
