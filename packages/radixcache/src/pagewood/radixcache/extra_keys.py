"""Token ids for what is not text: images, audio and other inputs whose placeholders all have the same id."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np

from pagewood.radixcache.arrays import Int32, require_int32
from pagewood.radixcache.counts import require_count


def with_extra_keys(tokens: Int32, extras: Iterable[tuple[int, int, bytes]]) -> Int32:
    """Return tokens in which the positions of each extra input have ids that stand for its contents.

    A prompt with an image has one placeholder id at all positions of the image, whichever it is. Pass the result of
    this function to the cache instead: two prompts then share pages only as far as their images agree too. The ids are
    negative, so they differ from all token ids. Each is 31 bits of a hash of the key and the position, so inputs of
    five positions or more are distinguished by at least 155 bits.

    Args:
        tokens: `[num_tokens] int32`, token ids, >= 0.
        extras: (start, end, key) for each input: its positions `[start, end)`, and what identifies its contents, for
            instance a hash of the pixels.

    Returns:
        `[num_tokens] int32`; a copy.

    Raises:
        ValueError: `tokens` is not a one-dimensional int32 array, or positions are not integers, are
            not within it, or overlap.
    """
    require_int32("tokens", tokens)
    marked = tokens.copy()
    last_end = 0
    for start, end, key in sorted(extras):
        require_count("start", start, least=None)
        require_count("end", end, least=None)
        if not last_end <= start < end <= len(tokens):
            raise ValueError(
                f"extras must be ranges within {len(tokens)} tokens that do not overlap, got [{start}, {end})"
            )
        marked[start:end] = _ids_of(key, end - start)
        last_end = end
    return marked


def _ids_of(key: bytes, count: int) -> Int32:
    """Return `count` negative ids: a hash of the key and of a counter for every 16 of them."""
    seed = blake2b(key).digest()
    blocks = [blake2b(seed + number.to_bytes(8, "little")).digest() for number in range(-(-count // 16))]
    return np.frombuffer(b"".join(blocks), "<i4")[:count].astype(np.int32) | np.int32(-(2**31))
