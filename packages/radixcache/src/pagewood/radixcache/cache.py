"""The prefix cache: token prefixes to the pages that hold their KV."""

from collections.abc import Iterator
from dataclasses import dataclass

from pagewood.radixcache import inspection
from pagewood.radixcache.arrays import Int32, from_bytes, require_int32
from pagewood.radixcache.node import Edge, Node
from pagewood.radixcache.observer import Observer, Run
from pagewood.radixcache.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The longest cached prefix of a token sequence.

    Attributes:
        num_tokens: its length, a multiple of the page size.
        pages: `[num_tokens / page_size] int32`, page ids, read-only; a snapshot that the tree will not change.
            They belong to the tree, and may be evicted unless `node` is locked.
        node: handle of the prefix, for `RadixCache.lock`.
    """

    num_tokens: int
    pages: Int32
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """What an insert did with the pages that it was given.

    Attributes:
        num_existing: the tree had this many of the first pages already, so `pages[:num_existing]` stay the caller's
            (unless they are the very pages that the tree holds there), and the others now belong to the tree.
        node: handle of the inserted prefix, for `RadixCache.lock` and `after`.
    """

    num_existing: int
    node: Node


class RadixCache:
    """Maps token prefixes to pages, page by page, and says which pages to give up first.

    Invariant: the tree owns exactly the pages that it adopted in `insert` and has not returned from `evict` or `clear`,
    and it never returns a page of a locked prefix.

    Only whole pages are cached: the tokens of a partial last page are ignored everywhere. A prefix is used when it is
    matched, inserted or unlocked, and then all that it begins with is used too; `evict` gives up the least recently
    used. Namespaces (an adapter, a tenant, a salt; None is one of them) share nothing but that order. Not thread-safe:
    one thread at a time.

    Args:
        page_size: tokens per page.

    Raises:
        ValueError: `page_size` is less than 1.

    Source: RadixAttention (arXiv 2312.07104).
    """

    __slots__ = ("_tree",)

    def __init__(self, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self._tree = Tree(page_size)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._tree.page_size

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns."""
        return self._tree.num_pages

    @property
    def num_locked(self) -> int:
        """Pages of locked prefixes."""
        return self._tree.num_locked

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return."""
        return self._tree.num_pages - self._tree.num_locked

    def num_pages_in(self, namespace: str | None = None) -> int:
        """Return the number of pages that the tree owns in one namespace."""
        return self._tree.num_pages_in.get(namespace, 0)

    def match(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Return the longest cached prefix of `tokens`, and count it as used.

        Nothing is split: where the prefix ends inside an edge, the edge counts as used once the prefix is locked.

        Args:
            tokens: `[num_tokens] int32`, token ids.
            namespace: where to look.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        match, edge = self._find(tokens, namespace)
        if match.node.end < edge.end and edge.parent is not None:
            edge = edge.parent
        self._tree.lru.touch(edge)
        return match

    def peek(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Return what `match` would, and leave recency alone; for probing a queue.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        return self._find(tokens, namespace)[0]

    def root(self, namespace: str | None = None) -> Node:
        """Return the handle of the empty prefix, which is always cached, can be locked, and serves as `after`."""
        return Node(self._tree.root(namespace), 0)

    def insert(
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: Node | None = None
    ) -> Insertion:
        """Adopt the pages of those whole pages of `tokens` that the tree lacks, and count the prefix as used.

        Args:
            tokens: `[num_tokens] int32`, token ids.
            pages: `[>= num_tokens // page_size] int32`, page ids, one per whole page; more are ignored.
            namespace: where to insert; with `after` it may be left out.
            after: a prefix, locked by the caller, that `tokens` and `pages` follow. The cost is then that of the new
                tokens, however long the prefix is.

        Returns:
            How many of `pages` stay the caller's, and the handle of the whole prefix, which is not locked.

        Raises:
            ValueError: an array is not one-dimensional int32, `pages` are too few, `after` has been evicted or is of
                another namespace.
        """
        tree = self._tree
        require_int32("tokens", tokens)
        require_int32("pages", pages)
        num_pages = len(tokens) // tree.page_size
        if len(pages) < num_pages:
            raise ValueError(f"pages must hold a page id for each of {num_pages} whole pages, got {len(pages)}")
        if after is None:
            base = tree.root(namespace)
        elif namespace is not None and namespace != after.namespace:
            raise ValueError(f"namespace must be that of after, {after.namespace!r}, got {namespace!r}")
        else:
            base = self._edge_ending_at(after)
        key = tokens[: num_pages * tree.page_size].tobytes()
        edge, num_existing, _ = tree.descend(base, key)
        end = base.end + num_existing
        if end < edge.end:
            edge = tree.split(edge, end)
        if num_existing < num_pages:
            values = pages[num_existing:num_pages].tobytes()
            edge = tree.attach(edge, key[num_existing * tree.page_bytes :], values)
        tree.lru.touch(edge)
        return Insertion(num_existing=num_existing, node=Node(edge, edge.end))

    def lock(self, node: Node) -> Node:
        """Lock a prefix, so that it is not evicted until it has been unlocked as often as it was locked.

        Returns:
            The handle to hold, for `insert(after=)` and `unlock`. It stays valid until it is unlocked.

        Raises:
            ValueError: the prefix has been evicted.
        """
        edge = self._edge_ending_at(node)
        self._tree.lock(edge)
        return node if node.edge is edge else Node(edge, node.end)

    def unlock(self, node: Node) -> None:
        """Take back one `lock`, and count the prefix as used.

        Raises:
            ValueError: `node` is not locked.
        """
        edge = self._tree.locate(node)
        if edge.end != node.end or not edge.num_leases:
            raise ValueError(f"node must be locked, got {node!r}")
        self._tree.unlock(edge)

    def evict(self, num_pages: int) -> Int32:
        """Give up the least recently used unlocked pages, each before the pages that it follows.

        Args:
            num_pages: how many to give up; all that can be evicted, if they are fewer. Never more.

        Returns:
            `[min(num_pages, num_evictable)] int32`, page ids, read-only; they belong to the caller.

        Raises:
            ValueError: `num_pages` is negative.
        """
        if num_pages < 0:
            raise ValueError(f"num_pages must be >= 0, got {num_pages}")
        return from_bytes(self._tree.evict(num_pages))

    def clear(self, namespace: str | None = None) -> Int32:
        """Give up all pages of one namespace but those of locked prefixes, which stay.

        `evict(num_evictable)` does the same for all namespaces.

        Returns:
            `[num_freed] int32`, page ids, read-only; they belong to the caller.
        """
        return from_bytes(self._tree.clear(namespace))

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every page that enters or leaves the tree from now on; `runs` has what is in it."""
        self._tree.observers.append(observer)

    def runs(self) -> Iterator[Run]:
        """Go through all that is cached, parents before what follows them; change nothing meanwhile."""
        return inspection.runs(self._tree)

    def check(self) -> None:
        """Verify every invariant, at a cost proportional to the tree.

        Raises:
            AssertionError: one does not hold; the message says which, and where.
        """
        inspection.check(self._tree)

    def dump(self) -> str:
        """Return the tree as text, an edge a line: its pages, its leases, and its place in the order of eviction."""
        return inspection.dump(self._tree)

    def _find(self, tokens: Int32, namespace: str | None) -> tuple[Match, Edge]:
        tree = self._tree
        page_size = tree.page_size
        require_int32("tokens", tokens)
        key = tokens[: len(tokens) // page_size * page_size].tobytes()
        edge, num_pages, parts = tree.descend(tree.root(namespace), key)
        return Match(num_tokens=num_pages * page_size, pages=from_bytes(parts), node=Node(edge, num_pages)), edge

    def _edge_ending_at(self, node: Node) -> Edge:
        """Return the edge that ends where `node` does, after a split where there was none."""
        edge = self._tree.locate(node)
        return edge if edge.end == node.end else self._tree.split(edge, node.end)
