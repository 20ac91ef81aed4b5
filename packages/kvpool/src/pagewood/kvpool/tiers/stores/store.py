"""The interface of a tier below the host: a store of page images by key."""

from collections.abc import Sequence
from typing import Protocol

from pagewood.kvpool.tiers.pages.arrays import Bytes


class PageStore(Protocol):
    """Stores page images by key, in batches: a disk, a shared folder, or a service on another machine.

    A store is a cache: it may forget any page at any time. It returns a page complete or not at all. A key has 32 bytes
    and determines the contents of the page, so putting a key twice puts the same bytes twice. Worker threads make these
    calls, several at a time. `pagewood.kvpool.tiers.testing.store_conformance` tests an implementation.
    """

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages. Pages that are already stored cost nothing; pages that do not fit are left out.

        Args:
            keys: Distinct keys.
            pages: `[page_bytes] uint8` each, contiguous; not read after the call has returned.

        Raises:
            OSError: The pages that were not stored before the failure are not stored.
        """
        ...

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages.

        Args:
            keys: Keys of any pages.
            pages: `[page_bytes] uint8` each, contiguous; written to.

        Returns:
            Whether each page was fetched, complete and verified. Where it was not, the contents of the memory are
            undefined.

        Raises:
            OSError: No page was fetched.
        """
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether `get` would probably find each page.

        Raises:
            OSError: The store did not answer.
        """
        ...

    def close(self) -> None:
        """Close files and connections. No other call may be running or follow."""
        ...
