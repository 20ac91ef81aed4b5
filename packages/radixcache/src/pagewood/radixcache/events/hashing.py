"""Names of blocks: a 256-bit hash of the namespace, the tokens of the block, and all tokens before it.

A block (a page, in the words of this package) is named by the SHA-256 of the name of the block before it followed by
its own tokens, four bytes each, least significant byte first. The first block of a sequence follows a name that stands
for its namespace: the SHA-256 of `pagewood block 1`, followed by nothing for None, by `:` and the name for a string,
and for a tuple by `(` and its parts. A part is a letter (`s` for a string, `i` for an int, `n` for None), the length of
its text in bytes, `:`, and the text, which is decimal for an int and empty for None.

So two blocks have the same name exactly if their namespaces, their tokens and all tokens before them are the same, in
every process that computes it.
"""

import hashlib
from collections.abc import Iterator

from pagewood.radixcache.arrays import ITEM_BYTES, Int32, require_int32
from pagewood.radixcache.counts import require_count
from pagewood.radixcache.namespaces import Namespace, encode

_DOMAIN = b"pagewood block 1"


def root_hash(namespace: Namespace) -> bytes:
    """Return the name that the first block of a sequence follows."""
    return hashlib.sha256(_DOMAIN + encode(namespace)).digest()


def chain_hashes(parent: bytes, tokens: Int32, block_size: int) -> Iterator[bytes]:
    """Yield the names of the whole blocks of `tokens`, which follow the block named `parent`."""
    data = tokens.astype("<i4", copy=False).tobytes()
    block_bytes = block_size * ITEM_BYTES
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = hashlib.sha256(parent + data[start : start + block_bytes]).digest()
        yield parent


def block_hashes(tokens: Int32, block_size: int, namespace: Namespace = None) -> Iterator[bytes]:
    """Yield the names of the whole blocks of a sequence, each computed when it is requested.

    Args:
        tokens: `[num_tokens] int32`, token ids, from the start of the sequence.
        block_size: tokens per block.
        namespace: the namespace of the sequence.

    Raises:
        ValueError: `tokens` is not a one-dimensional int32 array, or `block_size` is not an integer >= 1.
    """
    require_int32("tokens", tokens)
    block_size = require_count("block_size", block_size, least=1)
    return chain_hashes(root_hash(namespace), tokens, block_size)
