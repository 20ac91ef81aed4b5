"""The key of a page outside the device: a hash of everything that its KV depends on."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeAlias

from pagewood.kvpool.arrays import check_at_least_one
from pagewood.kvpool.tiers.pages.arrays import Bytes, Int32

Namespace: TypeAlias = str | tuple[str | int | None, ...] | None
"""A namespace of the device's cache."""

# Long enough that finding two prefixes with one key is infeasible, so a tenant cannot forge the page of another.
KEY_BYTES = 32


class KeyChain:
    """Names pages by content: the key of a page hashes the page's tokens and the key of the previous page.

    Invariant: two pages have the same key if and only if fingerprint, page size, namespace and all tokens up to the end
    of the page are equal. So the tiers need no tree, and processes agree on keys without communicating.

    Source: the chained block hashes of vLLM's prefix cache.
    """

    __slots__ = ("_page_bytes", "_seed")

    def __init__(self, page_size: int, *, fingerprint: bytes) -> None:
        """Create the chain of a model.

        Args:
            page_size: Tokens per page.
            fingerprint: Any bytes that identify the other dependencies of the KV: weights, dtype, layout.

        Raises:
            ValueError: `page_size` is less than 1 or not an integer.
        """
        check_at_least_one(page_size=page_size)
        page_size = int(page_size)
        self._page_bytes = page_size * 4
        self._seed = blake2b(page_size.to_bytes(8, "little") + fingerprint, digest_size=KEY_BYTES).digest()

    def root(self, namespace: Namespace) -> bytes:
        """Return the key of a namespace's empty prefix; None and "" are different namespaces."""
        if isinstance(namespace, tuple):
            name = b"\2" + b"".join(map(_encode_part, namespace))
        else:
            name = b"\0" if namespace is None else b"\1" + namespace.encode()
        return blake2b(self._seed + name, digest_size=KEY_BYTES).digest()

    def extend(self, parent: bytes, tokens: Int32) -> list[bytes]:
        """Return the keys of the whole pages of `tokens`, which follow the prefix with the key `parent`.

        Args:
            parent: Key of the preceding prefix.
            tokens: `[num_tokens] int32`; a partial page at the end is ignored.
        """
        data = tokens.astype("<i4", copy=False).tobytes()
        page_bytes = self._page_bytes
        keys: list[bytes] = []
        for start in range(0, len(data) - page_bytes + 1, page_bytes):
            parent = blake2b(parent + data[start : start + page_bytes], digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys


def check_sizes(keys: Sequence[bytes], pages: Sequence[Bytes], page_bytes: int) -> None:
    """Check the keys and the pages that are stored.

    Raises:
        ValueError: A key does not have `KEY_BYTES` bytes, or a page not `page_bytes`.
    """
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ValueError(f"keys must have {KEY_BYTES} bytes, got {len(key)}")
    for page in pages:
        if page.nbytes != page_bytes:
            raise ValueError(f"pages must have {page_bytes} bytes, got {page.nbytes}")


def _encode_part(part: str | int | None) -> bytes:
    kind, data = (b"n", b"") if part is None else (b"s" if isinstance(part, str) else b"i", str(part).encode())
    return b"%b%d:%b" % (kind, len(data), data)
