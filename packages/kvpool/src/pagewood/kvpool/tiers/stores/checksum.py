"""The checksum of a page that is stored outside the process's memory."""

from xxhash import xxh3_128

from pagewood.kvpool.tiers.pages.arrays import Bytes

CHECKSUM_BYTES = 16
FORM = "xxh3"
"""Name of this checksum in the names of stored pages, so that pages with another checksum are not found."""


def checksum(key: bytes, page: Bytes) -> bytes:
    """Return 16 bytes that detect a torn or damaged page, or the page of another key.

    This is the 128-bit XXH3 of the key and the page, in big-endian order. It misses damage in one of 2**128 cases, and
    no kind of damage more often than another. It is computed at the speed of memory, without Python's global lock. It
    does not protect against an attacker that can write to the store, because it could write the checksum too.

    Args:
        key: Key of the page, `KEY_BYTES` bytes.
        page: `[page_bytes] uint8`, contiguous.
    """
    digest = xxh3_128(key)
    digest.update(page.data)
    return digest.digest()
