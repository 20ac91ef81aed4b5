"""The result of an insert: which pages the tree has adopted."""

from pagewood.radixcache.arrays import Int32, from_bytes
from pagewood.radixcache.node import Node


class Insertion:
    """The result of an insert. Callers read it and must not change it.

    Attributes:
        num_existing: number of leading pages that the tree already had. The first `num_existing` of the offered pages
            still belong to the caller (unless they are the very pages that the tree holds there); the others now belong
            to the tree.
        node: handle of the inserted prefix, for `RadixCache.lock` and `after`.
    """

    __slots__ = ("_parts", "node", "num_existing")

    def __init__(self, num_existing: int, node: Node, parts: list[bytes]) -> None:
        self.num_existing = num_existing
        self.node = node
        self._parts = parts  # the ids of the pages, as int32 bytes

    @property
    def pages(self) -> Int32:
        """`[num_tokens // page_size] int32`, the pages that the tree has for the inserted tokens, read-only.

        The first `num_existing` stand in the place of those that were offered: an engine that may still change a page
        table can write them into it, and free its own.
        """
        return from_bytes(self._parts)

    def __repr__(self) -> str:
        return f"Insertion(num_existing={self.num_existing}, node={self.node!r})"
