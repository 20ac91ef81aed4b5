"""A file of page images at fixed offsets, with a table of their keys.

| part | bytes | contents |
|---|---|---|
| head | 4,096 | magic, page size, number of slots, fingerprint |
| table | 64 per slot, rounded up to 4,096 | key (32), checksum (16), sequence number (8), unused (8) |
| pages | page_bytes per slot | page images |

The file is never synced, and a page and its entry are written in any order. After a crash an entry counts only if its
checksum matches the page in the slot. Numbers are little-endian. The magic ends in the number of the format, which
includes the kind of checksum: pages of a file of another format are not read.
"""

import fcntl
import logging
import os
import shutil
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.tiers.stores.copier import read_rows, write_rows

# One slot of the table. A slot with the sequence number 0 has never held a page.
ENTRY = np.dtype([("key", "u1", 32), ("checksum", "u1", 16), ("sequence", "<u8"), ("unused", "<u8")])

_log = logging.getLogger(__name__)

_MAGIC = b"pagewood pages 2"
_ANY_FORM = _MAGIC[:-1]
_HEAD = struct.Struct("<16sQQ32s")
_BLOCK_BYTES = 4096


class PageFile:
    """An open page file, locked against other processes.

    Invariant: no two calls access the same slot at the same time. The caller ensures this, because the file does not
    know which slots are in use.

    Attributes:
        path: Path of the file.
        page_bytes: Size of a page image, in bytes.
        num_slots: Number of slots.
        descriptor: File descriptor.
    """

    __slots__ = ("_start", "descriptor", "num_slots", "page_bytes", "path")

    def __init__(
        self, path: Path, *, page_bytes: int, num_slots: int, fingerprint: bytes, sets_aside: bool = False
    ) -> None:
        """Open the file, or create it. A file of another format, page size or number of slots is emptied.

        Args:
            path: Path of the file.
            page_bytes: Size of a page image, in bytes.
            num_slots: Number of slots.
            fingerprint: Up to 32 bytes that identify the content of pages. A file with another fingerprint is refused.
            sets_aside: Whether a file of another kind is renamed instead of refused.

        Raises:
            ValueError: The file cannot be created or written, is in use by another process, is not a page file of this
                fingerprint, or the disk has no room for it.
        """
        self.path = path
        self.page_bytes = page_bytes
        self.num_slots = num_slots
        table_bytes = -(-num_slots * ENTRY.itemsize // _BLOCK_BYTES) * _BLOCK_BYTES
        self._start = _BLOCK_BYTES + table_bytes
        self.descriptor = self._open()
        try:
            self._claim(_HEAD.pack(_MAGIC, page_bytes, num_slots, fingerprint.ljust(32, b"\0")), sets_aside=sets_aside)
        except BaseException:
            os.close(self.descriptor)
            raise

    def entries(self) -> NDArray[np.void]:
        """Read the whole table, `[num_slots] ENTRY`."""
        table = np.zeros(self.num_slots, ENTRY)
        read_rows(self.descriptor, [table.view(np.uint8)], _BLOCK_BYTES)
        return table

    def offset(self, slot: int) -> int:
        """Return the offset of a slot's page in the file, in bytes."""
        return self._start + slot * self.page_bytes

    def write_entries(self, slot: int, entries: NDArray[np.void]) -> None:
        """Write the entries of consecutive slots, starting at `slot`.

        Raises:
            OSError: The disk is full or failed. Any part may have been written.
        """
        write_rows(self.descriptor, [entries.view(np.uint8)], _BLOCK_BYTES + slot * ENTRY.itemsize)

    def close(self) -> None:
        """Close the file, which also unlocks it."""
        os.close(self.descriptor)

    def _open(self) -> int:
        """Open the file, or create it; return its descriptor."""
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"path must be a file that can be made and written, got {path}: {error}") from error

    def _set_aside(self) -> None:
        """Rename the file, which is not a page file, and open a new one instead."""
        aside = self.path.with_name(self.path.name + ".aside")
        _log.warning("%s is not a page file, perhaps damaged: it is renamed to %s", self.path, aside.name)
        self.path.replace(aside)
        os.close(self.descriptor)
        self.descriptor = self._open()  # written by: _set_aside

    def _claim(self, head: bytes, *, sets_aside: bool) -> None:
        """Lock the file, and write this head if it has none, or a head of another format or geometry.

        A head of zeros counts as missing: after a loss of power a file may have its size but not its contents.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"path must not be in use, got {self.path}, which another process has open "
                "(processes can share a SharedFolder)"
            ) from error
        found = os.pread(self.descriptor, _HEAD.size, 0)
        if found == head:
            return
        if not found.strip(b"\0"):
            found = b""
        if found and not found.startswith(_ANY_FORM) and sets_aside:
            self._set_aside()
            self._claim(head, sets_aside=False)
            return
        if found and not found.startswith(_ANY_FORM):
            raise ValueError(f"path must be a page file or not exist, got {self.path}, which is another kind of file")
        if found and found[-32:] != head[-32:]:
            raise ValueError(
                f"path must hold pages of the same model and layout, got {self.path}, which has another fingerprint: "
                "delete it, or choose another path"
            )
        needed = self._start + self.num_slots * self.page_bytes
        os.ftruncate(self.descriptor, 0)
        available = shutil.disk_usage(self.path.parent).free
        if needed > available:
            raise ValueError(f"the disk of {self.path} must have {needed} bytes free, got {available}")
        os.ftruncate(self.descriptor, needed)
        os.pwrite(self.descriptor, head, 0)
