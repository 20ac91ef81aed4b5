"""The names of the pages that a cache holds."""

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events.hashing import chain_hashes, root_hash
from pagewood.radixcache.namespaces import Namespace


class BlockNames:
    """Maps page ids to block hashes, for the pages that are cached at one point in the history of a cache.

    Invariant: it has the name of every page that was passed to `store` and not to `remove` since.
    """

    __slots__ = ("_by_page", "_page_size")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._by_page: dict[int, bytes] = {}  # written by: store, remove

    def of(self, pages: Int32) -> list[bytes]:
        """Return the names of pages."""
        return [self._by_page[page] for page in pages.tolist()]

    def of_parent(self, page: int | None) -> bytes | None:
        """Return the name of a parent page, or None for no parent."""
        return None if page is None else self._by_page[page]

    def store(self, namespace: Namespace, parent_page: int | None, tokens: Int32, pages: Int32) -> list[bytes]:
        """Name pages that have been cached, and return their names."""
        parent = root_hash(namespace) if parent_page is None else self._by_page[parent_page]
        names = list(chain_hashes(parent, tokens, self._page_size))
        self._by_page.update(zip(pages.tolist(), names, strict=True))
        return names

    def remove(self, pages: Int32) -> list[bytes]:
        """Forget pages that are no longer cached, and return their names."""
        return [self._by_page.pop(page) for page in pages.tolist()]
