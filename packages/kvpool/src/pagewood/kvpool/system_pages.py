"""Memory that goes back to the operating system while its addresses stay valid."""

import ctypes
import sys

_PAGE_BYTES = 4096
_DONT_NEED, _REMOVE = 4, 9  # Linux


def can_return_pages() -> bool:
    """Return whether `return_pages` does something on this system."""
    return sys.platform == "linux"


def return_pages(address: int, num_bytes: int, *, is_shared: bool = False) -> None:
    """Give the whole system pages in some memory back to the system; what lies at its ends stays.

    They then read as zeros, or as the file that is mapped there, and take memory again when they are next used.

    Args:
        address: of the first byte.
        num_bytes: from there on.
        is_shared: whether other processes have this memory mapped too, as a file without a disk: then it goes back for
            all of them. A file on a disk would lose what it holds.

    Raises:
        OSError: the system refuses, or is not Linux.
    """
    if sys.platform != "linux":
        raise OSError("memory can be given back to Linux only")
    first = -(-address // _PAGE_BYTES) * _PAGE_BYTES
    end = (address + num_bytes) // _PAGE_BYTES * _PAGE_BYTES
    if first >= end:
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)  # not ours
    if advise(first, end - first, _REMOVE if is_shared else _DONT_NEED) != 0:
        raise OSError(ctypes.get_errno(), "memory could not be given back")
