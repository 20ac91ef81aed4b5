"""The result of a match: the longest cached prefix, and a cached page that shares only some of the next tokens."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from pagewood.radixcache.arrays import ITEM_BYTES, Int32
from pagewood.radixcache.node import Edge, Node
from pagewood.radixcache.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A cached page whose first tokens are the next tokens of a sequence.

    Attributes:
        num_tokens: number of leading tokens that are equal, in [1, page_size).
        page: page id. It belongs to the tree and may be evicted, so copy the KV of those tokens to a page of your own.
    """

    num_tokens: int
    page: int


class Match:
    """The longest cached prefix of a token sequence. Callers read it and must not change it.

    Attributes:
        num_tokens: length of the prefix, a multiple of the page size.
        pages: `[num_tokens / page_size] int32`, page ids, read-only. A snapshot: later changes of the tree do not
            affect it. The pages belong to the tree and may be evicted unless `node` is locked.
        node: handle of the prefix, for `RadixCache.lock`.
    """

    __slots__ = ("_tokens", "_tree", "node", "num_tokens", "pages")

    def __init__(self, num_tokens: int, pages: Int32, node: Node, tokens: Int32, tree: Tree) -> None:
        self.num_tokens = num_tokens
        self.pages = pages
        self.node = node
        self._tokens = tokens
        self._tree = tree

    @property
    def partial(self) -> Partial | None:
        """The cached page that shares the most tokens after the prefix; None if no page shares the first of them.

        None too if the next page is cached as a whole, and the match is shorter because it needs a snapshot.

        It is computed on access, in time proportional to the number of branches at the end of the prefix. Read it
        before the cache or the tokens change.

        Raises:
            ValueError: the prefix has been evicted.
        """
        tree = self._tree
        rest = self._tokens[self.num_tokens : self.num_tokens + tree.page_size]
        if not len(rest):
            return None
        edge = tree.locate(self.node)
        pages, page_ids = _next_pages(tree, edge, self.node.end)
        agree = np.frombuffer(pages, np.int32).reshape(-1, tree.page_size)[:, : len(rest)] == rest
        candidates = np.flatnonzero(agree[:, 0])
        if not len(candidates):
            return None
        lengths = np.logical_and.accumulate(agree[candidates], axis=1).sum(axis=1)
        best = int(lengths.argmax())
        if lengths[best] == tree.page_size:
            return None
        page_bytes = page_ids[int(candidates[best])]
        return Partial(num_tokens=int(lengths[best]), page=int.from_bytes(page_bytes, sys.byteorder, signed=True))

    def __repr__(self) -> str:
        return f"Match(num_tokens={self.num_tokens}, pages={self.pages!r}, node={self.node!r})"


def _next_pages(tree: Tree, edge: Edge, end: int) -> tuple[bytes, list[bytes]]:
    """Return the tokens of all pages that follow the first `end` pages of a path, and the ids of these pages."""
    if end < edge.end:
        at = end - edge.start
        key = edge.key[at * tree.page_bytes : (at + 1) * tree.page_bytes]
        return key, [edge.values[at * ITEM_BYTES : (at + 1) * ITEM_BYTES]]
    return b"".join(edge.children), [child.values[:ITEM_BYTES] for child in edge.children.values()]
