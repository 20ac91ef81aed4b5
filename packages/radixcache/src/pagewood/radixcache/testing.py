"""The conformance suite: what a prefix cache must do, for any implementation of `PrefixCache`.

Needs hypothesis (`pip install pagewood-radixcache[testing]`). In a test module of your own:

    class TestMyCache(conformance_machine(MyCache, page_size=16).TestCase):
        settings = hypothesis.settings(max_examples=200, deadline=None)
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewood.radixcache.arrays import Int32

N = TypeVar("N")
NodeT_co = TypeVar("NodeT_co", covariant=True)

PageTokens: TypeAlias = tuple[int, ...]
"""The tokens of one whole page."""

Prefix: TypeAlias = tuple[PageTokens, ...]
"""Whole pages from the start of a sequence."""


class MatchLike(Protocol[NodeT_co]):
    """What `match` and `peek` return."""

    @property
    def num_tokens(self) -> int:
        """Length of the matched prefix."""
        ...

    @property
    def pages(self) -> Int32:
        """`[num_tokens / page_size] int32`, page ids."""
        ...

    @property
    def node(self) -> NodeT_co:
        """Handle of the matched prefix."""
        ...


class InsertionLike(Protocol[NodeT_co]):
    """What `insert` returns."""

    @property
    def num_existing(self) -> int:
        """Leading pages that stay the caller's."""
        ...

    @property
    def node(self) -> NodeT_co:
        """Handle of the inserted prefix."""
        ...


class PrefixCache(Protocol[N]):
    """A cache of token prefixes, as `RadixCache` documents it, method by method; `N` is its kind of handle."""

    @property
    def num_pages(self) -> int:
        """Pages owned."""
        ...

    @property
    def num_locked(self) -> int:
        """Pages of locked prefixes."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return."""
        ...

    def num_pages_in(self, namespace: str | None = None) -> int:
        """Return the pages owned in one namespace."""
        ...

    def match(self, tokens: Int32, namespace: str | None = None) -> MatchLike[N]:
        """Return the longest cached prefix, and count it as used."""
        ...

    def peek(self, tokens: Int32, namespace: str | None = None) -> MatchLike[N]:
        """Return the longest cached prefix, and change nothing."""
        ...

    def root(self, namespace: str | None = None) -> N:
        """Return the handle of the empty prefix."""
        ...

    def insert(
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: N | None = None
    ) -> InsertionLike[N]:
        """Adopt what is missing, and count the prefix as used."""
        ...

    def lock(self, node: N) -> N:
        """Lock a prefix, and return the handle to hold."""
        ...

    def unlock(self, node: N) -> None:
        """Take back one lock, and count the prefix as used."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Give up the least recently used pages."""
        ...

    def clear(self, namespace: str | None = None) -> Int32:
        """Give up the unlocked pages of a namespace."""
        ...

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        ...


class Oracle:
    """A prefix cache by brute force: a dict from every cached prefix to its last page, each with its own recency.

    Invariant: with a prefix, all its own prefixes are cached.
    """

    def __init__(self) -> None:
        self.pages: dict[tuple[str | None, Prefix], int] = {}
        self.used: dict[tuple[str | None, Prefix], int] = {}
        self.leases: list[tuple[str | None, Prefix]] = []
        self.clock = 0

    def match(self, namespace: str | None, prefix: Prefix) -> list[int]:
        """Return the pages of the longest cached prefix."""
        found: list[int] = []
        for end in range(1, len(prefix) + 1):
            page = self.pages.get((namespace, prefix[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def touch(self, namespace: str | None, prefix: Prefix) -> None:
        """Count a prefix as used."""
        self.clock += 1
        for end in range(1, len(prefix) + 1):
            self.used[namespace, prefix[:end]] = self.clock

    def insert(self, namespace: str | None, prefix: Prefix, pages: list[int]) -> int:
        """Adopt the last pages of `prefix` where they are missing, and return how many were there."""
        start = len(prefix) - len(pages)
        num_existing = max(0, len(self.match(namespace, prefix)) - start)
        for end in range(start + num_existing, len(prefix)):
            self.pages[namespace, prefix[: end + 1]] = pages[end - start]
        self.touch(namespace, prefix)
        return num_existing

    def is_locked(self, namespace: str | None, prefix: Prefix) -> bool:
        """Return whether a lease holds the last page of `prefix`."""
        return any(name == namespace and held[: len(prefix)] == prefix for name, held in self.leases)

    def lock(self, namespace: str | None, prefix: Prefix) -> None:
        """Hold a prefix by one more lease."""
        self.leases.append((namespace, prefix))

    def unlock(self, index: int) -> None:
        """Drop a lease."""
        self.touch(*self.leases.pop(index))

    def evict(self, num_pages: int) -> list[int]:
        """Give up the least recently used unlocked page that no cached page follows, time after time."""
        freed: list[int] = []
        while len(freed) < num_pages and (leaves := self._unlocked_leaves()):
            freed.append(self._drop(min(leaves, key=self.used.__getitem__)))
        return freed

    def clear(self, namespace: str | None) -> list[int]:
        """Give up the unlocked pages of a namespace."""
        mine = [key for key in self.pages if key[0] == namespace and not self.is_locked(*key)]
        return [self._drop(key) for key in mine]

    def num_locked(self) -> int:
        """Return the number of pages that a lease holds."""
        return sum(self.is_locked(*key) for key in self.pages)

    def _unlocked_leaves(self) -> list[tuple[str | None, Prefix]]:
        inner = {(namespace, prefix[:-1]) for namespace, prefix in self.pages}
        return [key for key in self.pages if key not in inner and not self.is_locked(*key)]

    def _drop(self, key: tuple[str | None, Prefix]) -> int:
        del self.used[key]
        return self.pages.pop(key)


def conformance_machine(
    make_cache: Callable[[int], PrefixCache[Any]], *, page_size: int
) -> type[RuleBasedStateMachine]:
    """Return a state machine that drives a cache and the oracle side by side, and fails where they differ.

    What it takes for granted, apart from the words of the Protocol: recency is exact by the page wherever a prefix is
    locked or inserted. (A bare `match` that ends where no insert or lease has ended may use more or less of the last
    stretch, so that implementations are free not to cut there; the machine does not ask.)

    Args:
        make_cache: called with the page size, for an empty cache.
        page_size: tokens per page.
    """

    def page_tokens(symbol: int) -> PageTokens:
        """Pages differ in one token, which is the first, the last or in between."""
        tokens = [7] * page_size
        tokens[(symbol * max(1, page_size // 2)) % page_size] = symbol
        return tuple(tokens)

    namespaces = st.sampled_from([None, "tenant"])
    prefixes = st.lists(st.integers(0, 1), max_size=6).map(lambda symbols: tuple(page_tokens(s) for s in symbols))
    tails = st.integers(0, page_size - 1)

    class ConformanceMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.cache = make_cache(page_size)
            self.oracle = Oracle()
            self.handles: list[Any] = []  # parallel to the oracle's leases
            self.num_pages_made = 0
            self.ends: set[tuple[str | None, Prefix]] = set()
            self.peeked: list[tuple[Any, str | None, Prefix]] = []

        @rule(namespace=namespaces, prefix=prefixes, tail=tails)
        def insert(self, namespace: str | None, prefix: Prefix, tail: int) -> None:
            pages = self.make_pages(len(prefix))
            insertion = self.cache.insert(tokens_of(prefix, tail), pages, namespace)
            assert insertion.num_existing == self.oracle.insert(namespace, prefix, pages.tolist())
            self.ends.add((namespace, prefix))

        @precondition(lambda self: self.handles)
        @rule(data=st.data(), more=prefixes, tail=tails)
        def extend(self, data: st.DataObject, more: Prefix, tail: int) -> None:
            """Insert after a held prefix, and move the lease on to the new end."""
            index = data.draw(st.integers(0, len(self.handles) - 1))
            handle, (namespace, held) = self.handles[index], self.oracle.leases[index]
            pages = self.make_pages(len(more))
            insertion = self.cache.insert(tokens_of(more, tail), pages, after=handle)
            assert insertion.num_existing == self.oracle.insert(namespace, held + more, pages.tolist())
            self.ends.add((namespace, held + more))
            if data.draw(st.booleans()):
                self.hold(insertion.node, namespace, held + more)
                self.release(index)

        @rule(namespace=namespaces, prefix=prefixes, tail=tails)
        def lease(self, namespace: str | None, prefix: Prefix, tail: int) -> None:
            match = self.cache.match(tokens_of(prefix, tail), namespace)
            expected = self.oracle.match(namespace, prefix)
            assert match.pages.tolist() == expected
            self.hold(match.node, namespace, prefix[: len(expected)])

        @rule(namespace=namespaces)
        def lease_root(self, namespace: str | None) -> None:
            self.hold(self.cache.root(namespace), namespace, ())

        @precondition(lambda self: self.handles)
        @rule(data=st.data())
        def unlock(self, data: st.DataObject) -> None:
            self.release(data.draw(st.integers(0, len(self.handles) - 1)))

        @precondition(lambda self: self.ends)
        @rule(data=st.data(), tail=tails)
        def match(self, data: st.DataObject, tail: int) -> None:
            namespace, prefix = data.draw(st.sampled_from(sorted(self.ends, key=repr)))
            match = self.cache.match(tokens_of(prefix, tail), namespace)
            assert match.pages.tolist() == self.oracle.match(namespace, prefix)
            self.oracle.touch(namespace, prefix)

        @rule(namespace=namespaces, prefix=prefixes, tail=tails)
        def peek(self, namespace: str | None, prefix: Prefix, tail: int) -> None:
            match = self.cache.peek(tokens_of(prefix, tail), namespace)
            expected = self.oracle.match(namespace, prefix)
            assert match.pages.tolist() == expected
            assert match.pages.dtype == np.int32
            assert match.num_tokens == len(match.pages) * page_size
            self.peeked.append((match.node, namespace, prefix[: len(expected)]))

        @precondition(lambda self: self.peeked)
        @rule(data=st.data())
        def lease_peeked(self, data: st.DataObject) -> None:
            """A handle stays good until its prefix is evicted, whatever else has happened."""
            self.hold(*self.peeked.pop(data.draw(st.integers(0, len(self.peeked) - 1))))

        @rule(num_pages=st.integers(0, 8))
        def evict(self, num_pages: int) -> None:
            freed = self.cache.evict(num_pages).tolist()
            expected = self.oracle.evict(num_pages)
            assert sorted(freed) == sorted(expected)
            self.forget_evicted()

        @rule(namespace=namespaces)
        def clear(self, namespace: str | None) -> None:
            assert sorted(self.cache.clear(namespace).tolist()) == sorted(self.oracle.clear(namespace))
            self.forget_evicted()

        @invariant()
        def counts_agree(self) -> None:
            num_locked = self.oracle.num_locked()
            assert self.cache.num_pages == len(self.oracle.pages)
            assert self.cache.num_locked == num_locked
            assert self.cache.num_evictable == len(self.oracle.pages) - num_locked
            for namespace in (None, "tenant"):
                num_pages = sum(key[0] == namespace for key in self.oracle.pages)
                assert self.cache.num_pages_in(namespace) == num_pages

        @invariant()
        def invariants_hold(self) -> None:
            self.cache.check()

        def teardown(self) -> None:
            """Everything comes back once: release all, evict all."""
            while self.handles:
                self.release(0)
            freed = self.cache.evict(self.num_pages_made).tolist()
            assert sorted(freed) == sorted(self.oracle.pages.values())
            assert self.cache.num_pages == 0

        def make_pages(self, num_pages: int) -> Int32:
            self.num_pages_made += num_pages
            return np.arange(self.num_pages_made - num_pages, self.num_pages_made, dtype=np.int32)

        def hold(self, node: Any, namespace: str | None, prefix: Prefix) -> None:
            self.handles.append(self.cache.lock(node))
            self.oracle.lock(namespace, prefix)

        def release(self, index: int) -> None:
            self.cache.unlock(self.handles.pop(index))
            self.oracle.unlock(index)

        def forget_evicted(self) -> None:
            """A prefix that was evicted may be cached again: not as an end, and not under the same handle."""
            self.ends = {end for end in self.ends if self.is_cached(*end)}
            self.peeked = [peeked for peeked in self.peeked if self.is_cached(*peeked[1:])]

        def is_cached(self, namespace: str | None, prefix: Prefix) -> bool:
            return not prefix or (namespace, prefix) in self.oracle.pages

    return ConformanceMachine


def tokens_of(prefix: Prefix, num_tail_tokens: int) -> Int32:
    """Return the tokens of some pages, and of a partial page after them."""
    tokens = [token for page in prefix for token in page]
    return np.array(tokens + [7] * num_tail_tokens, np.int32)
