"""The array types that cross the borders of the tiers, and memory for them."""

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_SYSTEM_PAGE_BYTES = 4096


def page_aligned_zeros(num_pages: int, page_bytes: int) -> Bytes:
    """Return `[num_pages, page_bytes]`, which costs memory only as it fills.

    It begins with a page of the system: files are read into it a fifth faster than 16 bytes off.
    """
    size = num_pages * page_bytes
    memory = np.zeros(size + _SYSTEM_PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _SYSTEM_PAGE_BYTES
    return memory[start : start + size].reshape(num_pages, page_bytes)
