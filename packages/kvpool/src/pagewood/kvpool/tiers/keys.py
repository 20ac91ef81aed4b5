"""The key of a page outside the device: a hash of everything that its KV depends on."""

from hashlib import blake2b

from pagewood.kvpool.tiers.arrays import Int32

# Long enough that two prefixes with the same key cannot be found, so a tenant cannot forge the page of another.
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
            fingerprint: Whatever else the KV depends on: weights, dtype, layout. Any bytes.

        Raises:
            ValueError: `page_size` is less than 1.
        """
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self._page_bytes = page_size * 4
        self._seed = blake2b(page_size.to_bytes(8, "little") + fingerprint, digest_size=KEY_BYTES).digest()

    def root(self, namespace: str | None) -> bytes:
        """Return the key of a namespace's empty prefix; None and "" are different namespaces."""
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
