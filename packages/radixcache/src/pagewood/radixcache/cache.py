"""The prefix cache: maps token prefixes to the pages that hold their KV."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from pagewood.radixcache import eviction, inspection
from pagewood.radixcache.arrays import Int32, as_key, from_bytes, require_int32
from pagewood.radixcache.counts import require_count
from pagewood.radixcache.eviction import Limits
from pagewood.radixcache.explain import Explanation, explain, explain_snapshot
from pagewood.radixcache.history import History
from pagewood.radixcache.insertion import Insertion
from pagewood.radixcache.match import Match
from pagewood.radixcache.namespaces import ANY, AnyNamespace, Namespace
from pagewood.radixcache.node import Edge, Node
from pagewood.radixcache.observer import Observer, ObserverAdapter, Run
from pagewood.radixcache.order.choice import AnyPolicy, name_of, order_for
from pagewood.radixcache.order.scored import Scored
from pagewood.radixcache.outline import Outline, outline
from pagewood.radixcache.policies import LRU, QueueInformed
from pagewood.radixcache.snapshots import Snapshots
from pagewood.radixcache.tree import Tree, last_item
from pagewood.radixcache.watches import Watch, Watches, WatchGroup


class RadixCache:
    """Maps token prefixes to pages, page by page, and decides which pages to evict first.

    Invariant: the tree owns exactly the pages that it adopted in `insert` and has not returned from `evict`, `clear` or
    `release`, and it never returns a page of a locked prefix. It owns exactly the snapshots that it adopted in `attach`
    and has not returned from `evict_snapshots`, and it never returns a snapshot at which a lease ends.

    Only whole pages are cached: the tokens of a partial last page are ignored everywhere. Matching, inserting or
    unlocking a prefix counts as a use of it and of all shorter prefixes of it. Namespaces (an adapter, a tenant, a
    salt; None is one of them) share nothing except the eviction order. Not thread-safe: use it from one thread at a
    time.

    Args:
        page_size: tokens per page.
        policy: decides which pages `evict` returns first; `LRU()` by default. Do not share one policy object between
            caches.
        history_tokens: number of evicted tokens to remember for `explain`, at 4 bytes each plus some overhead per run.
        clock: returns seconds, for `explain`.

    Raises:
        ValueError: `page_size` is not an integer >= 1, or `history_tokens` not one >= 0.

    Source: RadixAttention (arXiv 2312.07104).
    """

    __slots__ = ("_history", "_is_informed", "_limits", "_policy", "_snapshots", "_tree", "_watches")

    def __init__(
        self,
        page_size: int,
        *,
        policy: AnyPolicy | None = None,
        history_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        page_size = require_count("page_size", page_size, least=1)
        history_tokens = require_count("history_tokens", history_tokens, least=0)
        self._policy: AnyPolicy = LRU() if policy is None else policy
        self._is_informed = isinstance(policy, QueueInformed)
        self._watches = Watches(page_size)
        make_order = partial(order_for, self._policy, page_size=page_size, watched_end=self._watches.watched_end)
        self._tree = Tree(page_size, make_order)
        self._limits = Limits()
        self._snapshots = Snapshots(clock)
        self._history = History(history_tokens, page_size=page_size, clock=clock) if history_tokens else None
        if self._history is not None:
            self._tree.listeners.append(self._history)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._tree.page_size

    @property
    def num_pages(self) -> int:
        """Number of pages that the tree owns."""
        return self._tree.num_pages

    @property
    def num_locked(self) -> int:
        """Number of pages of locked prefixes."""
        return self._tree.num_locked

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can return; pages protected by a floor are not counted."""
        tree = self._tree
        num_unlocked = tree.num_pages - tree.num_locked
        return num_unlocked - self._limits.num_guarded() if self._limits.spaces else num_unlocked

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that the cache owns, also those whose prefix has been evicted."""
        return len(self._snapshots)

    def num_pages_in(self, namespace: Namespace = None) -> int:
        """Return the number of pages that the tree owns in one namespace."""
        space = self._tree.spaces.get(namespace)
        return space.num_pages if space else 0

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have pages, leases or limits."""
        return list(self._tree.spaces)

    def limit(self, namespace: Namespace, *, quota: int | None = None, floor: int = 0) -> None:
        """Set the limits of a namespace; a namespace has no limits until this is called.

        Each limited namespace has an eviction order of its own, and `evict` looks at the head of each of them. So limit
        dozens of namespaces, not thousands.

        Args:
            namespace: the namespace to limit.
            quota: pages. While namespaces hold more than their quotas, `evict` takes pages from these namespaces first.
                None means no quota.
            floor: pages. `evict` leaves at least this many in the namespace, locked pages included, unless it is called
                for this namespace.

        Raises:
            ValueError: `floor` is negative or more than `quota`, or one of them is not an integer.
        """
        floor = require_count("floor", floor, least=0)
        if quota is not None and (quota := require_count("quota", quota, least=0)) < floor:
            raise ValueError(f"floor must be in [0, quota], got floor {floor}, quota {quota}")
        space = self._tree.root(namespace).space
        self._limits.set(self._tree, space, quota, floor)

    def match(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> Match:
        """Return the longest cached prefix of `tokens`, and count it as used.

        Nothing is split. If the prefix ends inside an edge, that edge counts as used only when the prefix is locked.
        Locking `node` also makes the match a hit, for policies that count hits.

        Args:
            tokens: `[num_tokens] int32`, token ids. `Match.partial` reads them later.
            namespace: the namespace to search.
            needs_snapshot: whether the prefix must end with a snapshot, which counts as used. If the cached pages do
                not end with one, the match is shorter than these, or empty. After locking `node`, `snapshot(node)`
                returns it.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        tree = self._tree
        edge, num_pages, parts = self._find(tokens, namespace)
        if needs_snapshot:
            edge, num_pages, parts = self._snapshots.cut(edge, parts, is_use=True)
        node = Node(edge, num_pages, True)
        if num_pages < edge.end and edge.parent is not None:
            edge = edge.parent
        if edge.parent is not None:
            edge.space.order.touch(edge, tree.tick())
        return Match(num_pages * tree.page_size, from_bytes(parts), node, tokens, tree)

    def peek(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> Match:
        """Return the same as `match` without counting a use, for example to probe a queue.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        tree = self._tree
        edge, num_pages, parts = self._find(tokens, namespace)
        if needs_snapshot:
            edge, num_pages, parts = self._snapshots.cut(edge, parts, is_use=False)
        return Match(num_pages * tree.page_size, from_bytes(parts), Node(edge, num_pages), tokens, tree)

    def watch(self, tokens: Int32, namespace: Namespace = None) -> Watch:
        """Return a live match: until it is closed, its `num_tokens` is always what `peek` would return.

        An open watch takes 4 bytes per token and about 500 bytes more. It costs one step per change of its length, and
        nothing otherwise. But the first watch of a cache makes every insert and eviction slightly slower.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        return self._watch(tokens, namespace, None, None)

    def watch_group(self) -> WatchGroup[Any]:
        """Return an empty group of live matches; it reports which of them have changed since the last query."""
        return WatchGroup[Any](self._watch)

    def root(self, namespace: Namespace = None) -> Node:
        """Return the handle of the empty prefix. It is always cached, can be locked, and can be passed as `after`."""
        return Node(self._tree.root(namespace), 0)

    def insert(
        self,
        tokens: Int32,
        pages: Int32,
        namespace: Namespace = None,
        *,
        after: Node | None = None,
        relock: bool = False,
    ) -> Insertion:
        """Adopt the pages that the tree lacks for the whole pages of `tokens`, and count the prefix as used.

        Args:
            tokens: `[num_tokens] int32`, token ids.
            pages: `[>= num_tokens // page_size] int32`, page ids, one per whole page; further ids are ignored. Ids
                should be dense: the cache keeps one byte for each id up to the largest.
            namespace: the namespace to insert into; optional if `after` is given.
            after: a prefix, locked by the caller, that `tokens` and `pages` follow. The cost then depends on the new
                tokens only, not on the length of the prefix.
            relock: whether to lock the whole prefix and unlock `after`, as `RadixCache.relock` does. It costs less
                than inserting and doing this later, because the new pages can become a part of the run before them.

        Returns:
            The number of `pages` that still belong to the caller, and the handle of the whole prefix, which is not
            locked unless `relock` is given.

        Raises:
            ValueError: an array is not one-dimensional int32; there are too few `pages`; a page to adopt is negative,
                duplicated, or in the tree already; `after` has been evicted, or belongs to another namespace or cache,
                or is not locked and to be unlocked. The content of the tree is then unchanged.
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
        if relock and (after is None or not after.num_locks):
            raise ValueError(f"after must be locked to relock, got {after!r}")
        key = as_key(tokens, num_pages * tree.page_size)
        edge, num_existing, parts = tree.descend(base, key)
        adopted = pages[num_existing:num_pages]
        if num_existing < num_pages:
            tree.pages.adopt(adopted)  # the last step that can fail
        end = base.end + num_existing
        if end < edge.end:
            edge = tree.split(edge, end)
        now = tree.tick()
        if num_existing < num_pages:
            values = adopted.tobytes()
            parts.append(values)
            new_key = bytes(key[num_existing * tree.page_bytes :])
            if not (relock and edge is base and tree.grow(edge, new_key, values)):
                edge = tree.attach(edge, new_key, values)
        edge.space.order.publish(edge, now)
        node = Node(edge, edge.end)
        if relock and after is not None:
            tree.lock(edge)
            tree.unlock(base)
            node.num_locks, after.num_locks = 1, after.num_locks - 1
        return Insertion(num_existing, node, parts)

    def lock(self, node: Node) -> Node:
        """Lock a prefix: it is not evicted until it has been unlocked as often as it was locked.

        Returns:
            `node`, for `insert(after=)` and `unlock`. It stays valid while it is locked.

        Raises:
            ValueError: the prefix has been evicted, or `node` belongs to another cache.
        """
        edge = self._edge_ending_at(node)
        self._tree.lock(edge)
        node.num_locks += 1
        if node.is_match:
            node.is_match = False
            edge.space.order.hit(edge)
        return node

    def relock(self, lease: Node, node: Node) -> Node:
        """Lock `node`, then unlock `lease`: how a growing request moves its lease after `insert`.

        Returns:
            `node`, for `insert(after=)` and `unlock`.

        Raises:
            ValueError: `lease` is not locked, the prefix of `node` has been evicted, or one of them belongs to another
                cache. Nothing has changed.
        """
        tree = self._tree
        tree.locate(lease)
        if not lease.num_locks:
            raise ValueError(f"lease must be locked, got {lease!r}")
        self.lock(node)  # may split the edge of the lease
        lease.num_locks -= 1
        tree.unlock(tree.locate(lease))
        return node

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of this handle, and count the prefix as used.

        Raises:
            ValueError: `node` is not locked, or belongs to another cache.
        """
        edge = self._tree.locate(node)
        if not node.num_locks:
            raise ValueError(f"node must be locked, got {node!r}")
        node.num_locks -= 1
        self._tree.unlock(edge)

    def retain(self, node: Node, *, priority: int, until: float = math.inf, start: int = 0) -> None:
        """Give the pages of a prefix a priority; pages with lower priorities are evicted first.

        A page that was given several priorities, for instance as part of a shared prefix, has the highest of those that
        have not ended. So a call never lowers what another call has given.

        Args:
            node: the prefix.
            priority: pages without a priority have 0.
            until: when the priority ends, in seconds of the clock of `Retained`.
            start: number of pages at the start of the prefix to leave unchanged.

        Raises:
            ValueError: the policy of the cache is not `Retained`; `priority` is not an integer; `until` is not a
                number; `start` is not the index of a page of the prefix; the prefix has been evicted, or `node` belongs
                to another cache.
        """
        tree = self._tree
        start = require_count("start", start, least=0)
        if start >= max(1, node.num_pages):
            raise ValueError(f"start must be a page of {node!r}, got {start}")
        require_count("priority", priority, least=None)
        if not isinstance(until, Real) or until != until:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"until must be a number, got {until!r:.80}")
        tree.locate(node)
        order = node.edge.space.order
        if not isinstance(order, Scored) or not order.keeps_priorities:
            raise ValueError(f"policy must be Retained to keep priorities, got {name_of(self._policy)}")
        edge = self._edge_ending_at(node)
        while edge.parent is not None and edge.end > start:
            if edge.start < start:
                tree.split(edge, start)
            order.retain(edge, priority, until)
            edge = edge.parent

    def attach(self, node: Node, snapshot: int) -> bool:
        """Adopt a snapshot: what else a model needs, besides the pages, to continue after a prefix.

        It stays until its last page leaves the tree or `evict_snapshots` takes it. A match that needs a snapshot can
        end here meanwhile.

        Args:
            node: the prefix, of at least one page.
            snapshot: the caller's number of it, such as a slot of a pool; the cache does not look into it.

        Returns:
            False if the prefix has a snapshot already. This counts as used, and the new one still belongs to the
            caller.

        Raises:
            ValueError: the cache owns `snapshot` already, or it is not an integer in [0, 2**31); the prefix is empty or
                has been evicted, or `node` belongs to another cache.
        """
        snapshots, tree = self._snapshots, self._tree
        snapshot = require_count("snapshot", snapshot, least=0)
        if snapshot >= 2**31 or snapshot in snapshots:
            raise ValueError(f"snapshot must be below 2**31 and not be attached already, got {snapshot}")
        edge = tree.locate(node)
        if not node.end:
            raise ValueError(f"node must have a page to attach a snapshot, got {node!r}")
        if snapshots not in tree.listeners:
            tree.listeners.append(snapshots)
        return snapshots.attach(edge, node.end, snapshot)

    def snapshot(self, node: Node) -> int | None:
        """Return the snapshot of a prefix, which still belongs to the cache, or None.

        Raises:
            ValueError: the prefix has been evicted, or `node` belongs to another cache.
        """
        return self._snapshots.at(self._tree.locate(node), node.end)

    def evict_snapshots(self, num_snapshots: int) -> Int32:
        """Return the snapshots whose pages are gone, and evict further ones if these are fewer than `num_snapshots`.

        Superseded snapshots are evicted first, then the least recently used ones. A snapshot is superseded when another
        one is attached further down its path and no other sequence branches off between the two. It is used when a
        match that needs a snapshot ends there. Those of locked prefixes stay, superseded ones only while a lease ends
        there; they become the last in order when an eviction passes over them.

        Returns:
            `[num_returned] int32`, snapshots, read-only; they belong to the caller.

        Raises:
            ValueError: `num_snapshots` is not an integer >= 0.
        """
        num_snapshots = require_count("num_snapshots", num_snapshots, least=0)
        freed = self._snapshots.evict(self._tree, num_snapshots)
        return from_bytes([np.array(freed, np.int32).tobytes()])

    def evict(self, num_pages: int, namespace: Namespace | AnyNamespace = ANY) -> Int32:
        """Evict unlocked pages in the order of the policy; a page is evicted only after all pages that follow it.

        Args:
            num_pages: number of pages to evict. If fewer can be evicted, all of these are.
            namespace: the namespace that needs the pages: its own floor does not protect it. `ANY` means no namespace
                in particular; None is a namespace.

        Returns:
            Page ids, `[min(num_pages, num_evictable)] int32`, read-only; with `namespace`, pages below its floor count
            as evictable too. They belong to the caller.

        Raises:
            ValueError: `num_pages` is not an integer >= 0, or the policy has returned a score that is NaN.
            Exception: what the policy has raised, in this call or since the last one. No page is lost by that: if some
                pages were evicted before, they are returned, and the next call raises.
        """
        if type(num_pages) is not int or num_pages < 0:
            num_pages = require_count("num_pages", num_pages, least=0)
        if self._history is not None:
            self._history.cause = name_of(self._policy)
        return self._hand_over(eviction.evict(self._tree, self._limits, num_pages, namespace))

    def clear(self, namespace: Namespace = None) -> Int32:
        """Remove all pages of one namespace except those of locked prefixes; floors are ignored.

        Returns:
            `[num_freed] int32`, page ids, read-only; they belong to the caller.
        """
        if self._history is not None:
            self._history.cause = "clear"
        return self._hand_over(eviction.clear(self._tree, self._tree.root(namespace).space))

    def release(self, node: Node, *, keeps_longer: bool = False) -> Int32:
        """Remove a branch that is not needed any more: the pages after a prefix, and those that only it needs.

        The latter are those from the end of the prefix up to the point where another cached sequence branches off.
        Locked pages stay; after they are unlocked they are evicted like any other page.

        Args:
            node: the prefix.
            keeps_longer: whether the pages after the prefix stay, and with them the prefix, if there are any.

        Returns:
            `[num_freed] int32`, page ids, read-only; they belong to the caller.

        Raises:
            ValueError: the prefix has been evicted, or `node` belongs to another cache.
        """
        edge = self._edge_ending_at(node)
        if self._history is not None:
            self._history.cause = "release"
        return self._hand_over(eviction.release(self._tree, edge, keeps_longer=keeps_longer))

    def explain(
        self,
        tokens: Int32,
        namespace: Namespace = None,
        *,
        searches_others: bool = True,
        needs_snapshot: bool = False,
    ) -> Explanation:
        """Return why the cached prefix of `tokens` is not longer; changes nothing, costs a match in each namespace.

        Args:
            tokens: `[num_tokens] int32`.
            namespace: of the sequence.
            searches_others: whether to search the other namespaces; without, it costs one match, and the cause is never
                `OTHER_NAMESPACE`.
            needs_snapshot: whether the prefix must end with a snapshot.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        match = self.peek(tokens, namespace)
        if needs_snapshot:
            shorter = explain_snapshot(self._tree, self._snapshots, match)
            if shorter is not None:
                return shorter
        return explain(self._tree, self._history, tokens, match, searches_others=searches_others)

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of every page that enters or leaves the tree from now on; see `runs` for those in it."""
        self._tree.listeners.append(ObserverAdapter(observer))

    def outline(self, *, max_branches: int = 200, max_visited: int = 4096) -> Outline:
        """Return the largest branches of the tree, in bounded time, for a display; changes nothing.

        Args:
            max_branches: the most branches to return.
            max_visited: the most runs to look at; each takes about a microsecond. In a larger tree, those nearest to
                the roots are looked at, so sums do not count what is deeper.

        Raises:
            ValueError: an argument is not an integer >= 1.
        """
        for name, value in (("max_branches", max_branches), ("max_visited", max_visited)):
            require_count(name, value, least=1)
        return outline(self._tree, max_branches=max_branches, max_visited=max_visited)

    def runs(self) -> Iterator[Run]:
        """Iterate over everything that is cached, parents first; do not change the cache during the iteration."""
        return inspection.runs(self._tree)

    def check(self) -> None:
        """Verify every invariant, at a cost proportional to the size of the tree and the number of watches.

        Raises:
            AssertionError: an invariant does not hold; the message names the invariant and the place.
        """
        inspection.check(self._tree)
        self._watches.check(self._num_cached)
        self._snapshots.check(self._tree)
        if self._history is not None:
            self._history.check()

    def dump(self) -> str:
        """Return the tree as text, one line per edge: tokens, pages, leases, and the rank in the eviction order."""
        return inspection.dump(self._tree)

    def _find(self, tokens: Int32, namespace: Namespace) -> tuple[Edge, int, list[bytes]]:
        tree = self._tree
        require_int32("tokens", tokens)
        return tree.descend(tree.root(namespace), as_key(tokens, len(tokens) // tree.page_size * tree.page_size))

    def _edge_ending_at(self, node: Node) -> Edge:
        """Return the edge that ends where `node` ends, splitting an edge there if necessary."""
        edge = self._tree.locate(node)
        if edge.end != node.end:
            edge = self._tree.split(edge, node.end)
        node.edge = edge
        return edge

    def _hand_over(self, parts: list[bytes]) -> Int32:
        pages = from_bytes(parts)
        self._tree.pages.drop(pages)
        return pages

    def _watch(self, tokens: Int32, namespace: Namespace, owner: Any, notes: dict[Watch, Any] | None) -> Watch:
        tree, watches = self._tree, self._watches
        if watches not in tree.listeners:
            tree.listeners.insert(0, watches)
        require_int32("tokens", tokens)
        key = tokens[: len(tokens) // tree.page_size * tree.page_size].tobytes()
        _, num_pages, parts = tree.descend(tree.root(namespace), memoryview(key))
        watch = Watch(key, namespace, self._unwatch, owner=owner, notes=notes)
        place = last_item(parts[-1]) if parts else namespace
        watches.open(watch, num_pages, place)
        return watch

    def _unwatch(self, watch: Watch) -> None:
        self._watches.close(watch)
        if self._is_informed:
            edge, _, _ = self._tree.descend(self._tree.root(watch.namespace), memoryview(watch.key))
            edge.space.order.expose(edge)  # without the watch it may be evicted earlier

    def _num_cached(self, watch: Watch) -> int:
        _, num_pages, _ = self._tree.descend(self._tree.root(watch.namespace), watch.key)
        return num_pages * self._tree.page_size
