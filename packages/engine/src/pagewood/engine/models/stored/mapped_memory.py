"""Gives memory of mapped files back to the system when it has been read, so that loading takes no memory for them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

from torch import Tensor

_DONT_NEED = 4  # for madvise: pages of a file are read again at their next use
_MAPS = Path("/proc/self/maps")
_LEAST_BYTES = 1 << 18


def give_back(tensor: Tensor) -> None:
    """Drop the pages of a tensor that lies in a mapped file; it can still be read.

    Nothing may have been written to it: writes to a private mapping would be lost. Does nothing with other memory, with
    less than a quarter of a megabyte, and on other systems than Linux.
    """
    if sys.platform != "linux" or tensor.nbytes < _LEAST_BYTES or not tensor.is_contiguous():
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    if not _is_in_file(start, end):
        return
    start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = end // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONT_NEED)


def _is_in_file(start: int, end: int) -> bool:
    """Whether all addresses in [start, end) belong to one mapping of a file."""
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        first, last = (int(address, 16) for address in addresses.split("-"))
        if first <= start and end <= last:
            return inode != "0" and bool(path) and path[0].startswith("/") and not path[0].startswith("/dev/zero")
    return False
