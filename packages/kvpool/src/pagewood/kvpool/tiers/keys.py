"""What a page is called outside the device: a hash of everything that its KV depends on."""

from hashlib import blake2b

from pagewood.kvpool.tiers.arrays import Int32

KEY_BYTES = 32
"""Long enough that nobody finds two prefixes with one key, so that a tenant cannot forge another's page."""


class KeyChain:
    """Names pages by content: the key of a page hashes the page's tokens and the key of the page before it.

    Invariant: two pages have one key exactly if fingerprint, page size, namespace and all tokens up to the page's end
    are the same. So tiers need no tree, and two processes agree on keys without speaking to each other.

    Args:
        page_size: tokens per page.
        fingerprint: what else the KV depends on: weights, dtype, layout. Any bytes.

    Source: the chained block hashes of vLLM's prefix cache.
    """

    __slots__ = ("_page_bytes", "_seed")

    def __init__(self, page_size: int, *, fingerprint: bytes) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self._page_bytes = page_size * 4
        self._seed = blake2b(page_size.to_bytes(8, "little") + fingerprint, digest_size=KEY_BYTES).digest()

    def root(self, namespace: str | None) -> bytes:
        """Return the key of a namespace's empty prefix; None and "" are two namespaces."""
        name = b"\0" if namespace is None else b"\1" + namespace.encode()
        return blake2b(self._seed + name, digest_size=KEY_BYTES).digest()

    def extend(self, parent: bytes, tokens: Int32) -> list[bytes]:
        """Return the keys of the whole pages of `tokens`, `[num_tokens] int32`, which follow the prefix of `parent`."""
        data = tokens.astype("<i4", copy=False).tobytes()
        page_bytes = self._page_bytes
        keys: list[bytes] = []
        for start in range(0, len(data) - page_bytes + 1, page_bytes):
            parent = blake2b(parent + data[start : start + page_bytes], digest_size=KEY_BYTES).digest()
            keys.append(parent)
        return keys
