"""What a tier below the host is: a store of page images by key."""

from collections.abc import Sequence
from typing import Protocol

from pagewood.kvpool.tiers.arrays import Bytes


class PageStore(Protocol):
    """Keeps page images by key, in batches; a disk, a shared folder, or a service on another machine.

    A store is a cache: it may forget any page at any time, and it answers with a page whole or not at all. Keys are 32
    bytes and say what is in the page, so putting a key twice puts the same bytes twice. Calls come from worker threads,
    several at a time. `pagewood.kvpool.tiers.testing.store_conformance` holds an implementation to this.
    """

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Keep pages; those that it has already cost nothing, and those that do not fit are left out.

        Args:
            keys: distinct.
            pages: `[page_bytes] uint8` each, contiguous; read until the call returns.

        Raises:
            OSError: what had not been kept by then is not kept.
        """
        ...

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages.

        Args:
            keys: of any pages.
            pages: `[page_bytes] uint8` each, contiguous; written to.

        Returns:
            Whether each page is there now, whole and verified; where it is not, the memory holds anything.

        Raises:
            OSError: none of them may be used.
        """
        ...

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether `get` would probably find each page.

        Raises:
            OSError: the store cannot be asked.
        """
        ...

    def close(self) -> None:
        """Give back files and connections; no other call may be running or follow."""
        ...
