"""A checksum of a page that costs a tenth of reading it."""

from hashlib import blake2b

import numpy as np

from pagewood.kvpool.tiers.arrays import Bytes

CHECKSUM_BYTES = 16
_BLOCK_BYTES = 4096


def checksum(key: bytes, page: Bytes) -> bytes:
    """Return 16 bytes that tell a page from the same page torn, rotten, or another's.

    The page is summed in blocks of 4 KiB as 64-bit words, at the speed of memory, and the key and the sums are hashed.
    A sum misses no single wrong word, and of other damage one case in 2**64; what is swapped between blocks changes two
    sums. It is no defence against somebody who writes to the store: whoever can do that can write the checksum too.

    Args:
        key: what the page is called.
        page: `[page_bytes] uint8`, contiguous.
    """
    end = page.size // _BLOCK_BYTES * _BLOCK_BYTES
    digest = blake2b(key, digest_size=CHECKSUM_BYTES)
    digest.update(np.add.reduce(page[:end].view(np.uint64).reshape(-1, _BLOCK_BYTES // 8), axis=1).data)
    digest.update(page[end:].data)
    return digest.digest()
