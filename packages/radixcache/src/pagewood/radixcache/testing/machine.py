"""The state machine that runs a cache and the oracle side by side."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.explain import Cause, Explanation
from pagewood.radixcache.namespaces import ANY, AnyNamespace, Namespace
from pagewood.radixcache.order.choice import AnyPolicy
from pagewood.radixcache.policies import LRU, S3FIFO
from pagewood.radixcache.testing.oracle import Oracle, PageTokens, Prefix
from pagewood.radixcache.testing.protocol import PrefixCache

NAMESPACES = (None, "a", ("b", None, 1))
SECONDS = (1.0, 1.0, 2.0, 2.0, math.inf)
_NUM_SNAPSHOTS = 12


class ManualClock:
    """A clock that moves only when its `now_s` is set."""

    def __init__(self) -> None:
        self.now_s = 0.0  # written by: machine

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now_s


def conformance_machine(
    make_cache: Callable[[int], PrefixCache[Any]],
    *,
    page_size: int,
    make_policy: Callable[[], AnyPolicy] = LRU,
    clock: ManualClock | None = None,
    remembers_all: bool = False,
) -> type[RuleBasedStateMachine]:
    """Return a state machine that runs a cache and the oracle side by side, and fails when they differ.

    One assumption goes beyond the Protocol: a use is exact to the page when a prefix is locked or inserted. After
    `match` alone, a cache may count more or less of the last run as used, because it need not split there. So the
    machine locks what it matches.

    Args:
        make_cache: called with the page size; returns an empty cache.
        page_size: tokens per page.
        make_policy: returns the policy that defines the exact eviction order of pages. S3FIFO does not score pages:
            then every order is accepted that evicts unlocked leaves only.
        clock: the clock of `Retained` in the cache and the oracle, if it is used; the machine moves it.
        remembers_all: whether `explain` knows everything that was ever evicted.
    """
    is_exact = not isinstance(make_policy(), S3FIFO)

    namespaces = st.sampled_from(NAMESPACES)
    beneficiaries = st.sampled_from((ANY, *NAMESPACES))
    prefixes = st.lists(st.integers(0, 1), max_size=6).map(lambda symbols: prefix_of(symbols, page_size))
    tails = st.integers(0, page_size - 1)
    picks = st.integers(0, 99)

    class ConformanceMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.cache = make_cache(page_size)
            self.rich: Any = self.cache  # for methods that the Protocol does not have
            self.oracle = Oracle(page_size, make_policy())
            self.handles: list[Any] = []  # in the order of the oracle's leases
            self.watches: list[Any] = []  # in the order of the oracle's watches
            self.group: Any = self.rich.watch_group() if hasattr(self.cache, "watch_group") else None
            self.grouped: dict[int, Any] = {}  # the open watches of the group, by owner
            self.lengths: dict[int, int] = {}  # their lengths after the last rule
            self.changed: dict[int, int] = {}  # owner -> rule of the first change since the last `changed`
            self.num_rules = 0
            self.num_pages_made = 0
            self.free_pages: list[int] = []  # reused, the last freed id first
            self.free_snapshots = list(range(_NUM_SNAPSHOTS))
            self.stale: list[Any] = []  # written by: soaking; handles of prefixes that have been evicted
            self.peeked: list[tuple[Any, Namespace, Prefix]] = []  # written by: soaking

        @rule(namespace=namespaces, prefix=prefixes, tail=tails, takes_snapshot=st.booleans())
        def insert(self, namespace: Namespace, prefix: Prefix, tail: int, takes_snapshot: bool) -> None:
            pages = self.make_pages(len(prefix))
            insertion: Any = self.cache.insert(tokens_of(prefix, tail), pages, namespace)
            assert insertion.num_existing == self.oracle.insert(namespace, prefix, pages.tolist())
            if hasattr(insertion, "pages"):
                assert insertion.pages.tolist() == self.oracle.match(namespace, prefix)
            self.free_pages += pages[: insertion.num_existing].tolist()
            self.peeked.append((insertion.node, namespace, prefix))
            if takes_snapshot and self.free_snapshots and hasattr(self.cache, "attach"):
                self.attach(-1)

        @precondition(lambda self: self.handles)
        @rule(pick=picks, more=prefixes, tail=tails, is_brief=st.booleans(), relock=st.booleans())
        def extend(self, pick: int, more: Prefix, tail: int, is_brief: bool, relock: bool) -> None:
            """Insert after a held prefix, and perhaps move the lease to the new end, in the same call or the next."""
            relock = relock and hasattr(self.cache, "relock")
            index = pick % len(self.handles)
            handle, (namespace, held) = self.handles[index], self.oracle.leases[index]
            pages = self.make_pages(len(more))
            insert = partial(self.rich.insert, relock=True) if relock else self.cache.insert
            insertion: Any = insert(tokens_of(more, tail), pages, after=handle)
            assert insertion.num_existing == self.oracle.insert(namespace, held + more, pages.tolist())
            if hasattr(insertion, "pages"):
                assert insertion.pages.tolist() == self.oracle.match(namespace, held + more)[len(held) :]
            self.free_pages += pages[: insertion.num_existing].tolist()
            if relock or (is_brief and hasattr(self.cache, "relock")):
                del self.handles[index]
                self.handles.append(insertion.node if relock else self.rich.relock(handle, insertion.node))
                self.oracle.lock(namespace, held + more, is_hit=False)
                self.oracle.unlock(index)
                expect_refusal(lambda: self.cache.unlock(handle))
            elif is_brief:
                self.hold(insertion.node, namespace, held + more)
                self.release_lease(index)

        @rule(namespace=namespaces, prefix=prefixes, tail=tails, is_brief=st.booleans(), needs_snapshot=st.booleans())
        def lease(self, namespace: Namespace, prefix: Prefix, tail: int, is_brief: bool, needs_snapshot: bool) -> None:
            needs_snapshot = needs_snapshot and hasattr(self.cache, "attach")
            match_it = partial(self.rich.match, needs_snapshot=True) if needs_snapshot else self.cache.match
            match: Any = match_it(tokens_of(prefix, tail), namespace)
            expected = self.oracle.match(namespace, prefix)
            if needs_snapshot:
                expected = expected[: self.oracle.match_snapshot(namespace, prefix)]
                found = namespace, prefix[: len(expected)]
                assert self.rich.snapshot(match.node) == self.oracle.snapshots.get(found)
                if expected:
                    self.oracle.use_snapshot(*found)
            assert match.pages.tolist() == expected
            assert match.num_tokens == len(expected) * page_size
            if expected:
                self.hold(match.node, namespace, prefix[: len(expected)], is_hit=True)
            else:
                self.hold(self.cache.root(namespace), namespace, ())
            if is_brief:
                self.release_lease(-1)

        @precondition(lambda self: self.handles)
        @rule(pick=picks)
        def unlock(self, pick: int) -> None:
            self.release_lease(pick % len(self.handles))

        @precondition(lambda self: self.peeked)
        @rule(pick=picks)
        def lease_peeked(self, pick: int) -> None:
            """A handle stays valid until its prefix is evicted, whatever else has happened."""
            self.hold(*self.peeked.pop(pick % len(self.peeked)))

        @rule(beneficiary=beneficiaries)
        def evict_one(self, beneficiary: Namespace | AnyNamespace) -> None:
            self.evict(1, beneficiary)

        @rule(num_pages=st.integers(0, 8), beneficiary=beneficiaries)
        def evict(self, num_pages: int, beneficiary: Namespace | AnyNamespace) -> None:
            for_namespace = {"namespace": beneficiary} if hasattr(self.cache, "limit") else {}
            freed = self.cache.evict(num_pages, **for_namespace).tolist()
            if is_exact:
                assert sorted(freed) == sorted(self.oracle.evict(num_pages, beneficiary))
            else:
                assert num_pages >= len(freed) >= min(num_pages, self.oracle.num_evictable())
                self.oracle.remove(freed)
            self.take_back(freed)

        @rule(namespace=namespaces)
        def clear(self, namespace: Namespace) -> None:
            freed = self.cache.clear(namespace).tolist()
            assert sorted(freed) == sorted(self.oracle.clear(namespace))
            self.take_back(freed)

        @precondition(lambda self: hasattr(self.cache, "release") and self.peeked)
        @rule(pick=picks, keeps_longer=st.booleans())
        def release(self, pick: int, keeps_longer: bool) -> None:
            node, namespace, prefix = self.peeked[pick % len(self.peeked)]
            freed = self.rich.release(node, keeps_longer=keeps_longer).tolist()
            assert sorted(freed) == sorted(self.oracle.release(namespace, prefix, keeps_longer=keeps_longer))
            self.take_back(freed)

        @precondition(lambda self: hasattr(self.cache, "attach") and self.peeked and self.free_snapshots)
        @rule(pick=picks)
        def attach(self, pick: int) -> None:
            node, namespace, prefix = self.peeked[pick % len(self.peeked)]
            snapshot = self.free_snapshots[-1]
            if not prefix:
                expect_refusal(lambda: self.rich.attach(node, snapshot))
                return
            is_adopted = self.rich.attach(node, snapshot)
            assert is_adopted == self.oracle.attach(namespace, prefix, snapshot)
            if is_adopted:
                self.free_snapshots.pop()
                expect_refusal(lambda: self.rich.attach(node, snapshot))

        @precondition(lambda self: hasattr(self.cache, "attach"))
        @rule(num_snapshots=st.integers(0, 3))
        def evict_snapshots(self, num_snapshots: int) -> None:
            freed = self.rich.evict_snapshots(num_snapshots).tolist()
            assert sorted(freed) == sorted(self.oracle.evict_snapshots(num_snapshots))
            self.free_snapshots += freed

        @precondition(lambda self: hasattr(self.cache, "retain") and clock is not None and bool(self.peeked))
        @rule(pick=picks, priority=st.integers(-1, 2), seconds=st.sampled_from(SECONDS))
        def retain(self, pick: int, priority: int, seconds: float) -> None:
            assert clock is not None  # the precondition
            node, namespace, prefix = self.peeked[pick % len(self.peeked)]
            start = pick % max(1, len(prefix))
            self.rich.retain(node, priority=priority, until=clock() + seconds, start=start)
            self.oracle.retain(namespace, prefix, start, priority, clock() + seconds)

        @precondition(lambda self: clock is not None)
        @rule()
        def wait(self) -> None:
            assert clock is not None  # the precondition
            clock.now_s += 1.0

        @precondition(lambda self: hasattr(self.cache, "limit"))
        @rule(namespace=namespaces, floor=st.integers(0, 4), room=st.integers(0, 5))
        def limit(self, namespace: Namespace, floor: int, room: int) -> None:
            quota = None if room == 5 else floor + room
            self.rich.limit(namespace, quota=quota, floor=floor)
            self.oracle.limits[namespace] = (math.inf if quota is None else quota, floor)

        @precondition(lambda self: hasattr(self.cache, "watch"))
        @rule(namespace=namespaces, prefix=prefixes, tail=tails, pick=picks)
        def watch(self, namespace: Namespace, prefix: Prefix, tail: int, pick: int) -> None:
            """Open a watch, or close one."""
            if pick % 10 < len(self.watches):
                self.oracle.watches.pop(pick % 10)
                closed = self.watches.pop(pick % 10)
                closed.close()
                for owner in [owner for owner, watch in self.grouped.items() if watch is closed]:
                    del self.grouped[owner], self.lengths[owner]
                    self.changed.pop(owner, None)
            elif pick % 2 and self.group is not None:
                owner = self.num_rules
                self.watches.append(self.group.watch(owner, tokens_of(prefix, tail), namespace))
                self.oracle.watches.append((namespace, prefix))
                self.grouped[owner] = self.watches[-1]
                self.lengths[owner] = self.watches[-1].num_tokens
            else:
                self.watches.append(self.rich.watch(tokens_of(prefix, tail), namespace))
                self.oracle.watches.append((namespace, prefix))

        @precondition(lambda self: self.grouped)
        @rule()
        def ask_group(self) -> None:
            """Every change is reported once, and earlier changes come first."""
            reported = self.group.changed()
            assert sorted(reported) == sorted(self.changed)
            rules = [self.changed[owner] for owner in reported]
            assert rules == sorted(rules)
            self.changed.clear()
            assert not self.group.changed()

        @rule(namespace=namespaces, prefix=prefixes, tail=tails)
        def look(self, namespace: Namespace, prefix: Prefix, tail: int) -> None:
            """Run read-only and refused calls; the invariants then verify that nothing has changed."""
            self.peek(namespace, prefix, tail)
            if hasattr(self.cache, "explain"):
                self.explain(namespace, prefix, tail)
                if hasattr(self.cache, "attach"):
                    self.explain_snapshot(namespace, prefix, tail)
            self.refuse(namespace)

        @invariant()
        def counts_agree(self) -> None:
            assert self.cache.num_pages == len(self.oracle.pages)
            assert self.cache.num_locked == self.oracle.num_locked()
            assert self.cache.num_evictable == self.oracle.num_evictable()
            if hasattr(self.cache, "attach"):
                assert self.rich.num_snapshots == len(self.oracle.snapshots) + len(self.oracle.loose)
            for namespace in NAMESPACES:
                assert self.cache.num_pages_in(namespace) == self.oracle.num_in(namespace)

        @invariant()
        def watches_agree(self) -> None:
            for watch, key in zip(self.watches, self.oracle.watches, strict=True):
                assert watch.num_tokens == len(self.oracle.match(*key)) * page_size

        @invariant()
        def note_changes(self) -> None:
            self.num_rules += 1
            for owner, watch in self.grouped.items():
                if watch.num_tokens != self.lengths[owner]:
                    self.lengths[owner] = watch.num_tokens
                    self.changed.setdefault(owner, self.num_rules)

        @invariant()
        def invariants_hold(self) -> None:
            self.cache.check()

        def teardown(self) -> None:
            """Release all leases and clear all namespaces: every page and snapshot must come back exactly once."""
            while self.handles:
                self.release_lease(0)
            freed = [page for namespace in NAMESPACES for page in self.cache.clear(namespace).tolist()]
            assert sorted(freed) == sorted(cached.page for cached in self.oracle.pages.values())
            assert self.cache.num_pages == 0
            if hasattr(self.cache, "attach"):
                returned = [*self.free_snapshots, *self.rich.evict_snapshots(0).tolist()]
                assert sorted(returned) == list(range(_NUM_SNAPSHOTS))

        def peek(self, namespace: Namespace, prefix: Prefix, tail: int) -> None:
            match = self.cache.peek(tokens_of(prefix, tail), namespace)
            expected = self.oracle.match(namespace, prefix)
            assert match.pages.tolist() == expected
            assert match.pages.dtype == np.int32
            assert match.num_tokens == len(match.pages) * page_size
            self.peeked.append((match.node, namespace, prefix[: len(expected)]))

        def explain(self, namespace: Namespace, prefix: Prefix, tail: int) -> None:
            tokens = tokens_of(prefix, tail)
            explanation: Explanation = self.rich.explain(tokens, namespace)
            partial = self.rich.peek(tokens, namespace).partial
            end = len(self.oracle.match(namespace, prefix))
            rest = tuple(tokens[end * page_size : (end + 1) * page_size].tolist())
            shared = self.oracle.partial(namespace, prefix[:end], rest)
            most = max(shared.values(), default=0)
            assert most == (partial.num_tokens if partial else 0)
            assert partial is None or shared[partial.page] == most
            assert explanation.num_tokens == end * page_size
            assert explanation.first_difference == end * page_size + most
            elsewhere = max(len(self.oracle.match(name, prefix)) for name in NAMESPACES if name != namespace)
            num_ever_cached = end
            while (
                num_ever_cached < len(prefix) and (namespace, prefix[: num_ever_cached + 1]) in self.oracle.ever_evicted
            ):
                num_ever_cached += 1
            match explanation.cause:
                case Cause.COMPLETE:
                    assert end * page_size == len(tokens)
                case Cause.EVICTED:
                    assert end < explanation.num_possible_tokens // page_size <= num_ever_cached
                    assert not remembers_all or explanation.num_possible_tokens == num_ever_cached * page_size
                case Cause.OTHER_NAMESPACE:
                    assert explanation.num_possible_tokens == elsewhere * page_size > end * page_size
                case Cause.PAGE_ROUNDING:
                    assert end == len(prefix) or most
                case Cause.NEVER_SEEN:
                    assert not most
                    assert max(elsewhere, end) < len(prefix)
                case Cause.SNAPSHOT_EVICTED | Cause.NO_SNAPSHOT:
                    raise AssertionError("no snapshot was needed")
            assert not remembers_all or (explanation.cause is Cause.EVICTED) == (num_ever_cached > end)

        def explain_snapshot(self, namespace: Namespace, prefix: Prefix, tail: int) -> None:
            tokens = tokens_of(prefix, tail)
            match = self.rich.peek(tokens, namespace, needs_snapshot=True)
            explanation: Explanation = self.rich.explain(tokens, namespace, needs_snapshot=True)
            of_pages: Explanation = self.rich.explain(tokens, namespace)
            usable = self.oracle.match_snapshot(namespace, prefix)
            assert match.num_tokens == explanation.num_tokens == usable * page_size
            num_cached = len(self.oracle.match(namespace, prefix))
            if usable == num_cached:
                assert explanation == of_pages
                return
            assert match.partial is None
            assert explanation.first_difference == of_pages.first_difference
            ends = range(usable + 1, num_cached + 1)
            lost = [end for end in ends if (namespace, prefix[:end]) in self.oracle.lost]
            assert explanation.cause is (Cause.SNAPSHOT_EVICTED if lost else Cause.NO_SNAPSHOT)
            assert explanation.num_possible_tokens == (lost[-1] if lost else num_cached) * page_size

        def refuse(self, namespace: Namespace) -> None:
            fresh = tokens_of(((9,) * page_size,) * 2, 0)
            wrong = [[self.num_pages_made] * 2, [-1, self.num_pages_made], [self.num_pages_made]]
            wrong += [[self.num_pages_made, cached.page] for cached in list(self.oracle.pages.values())[:1]]
            for pages in wrong:
                expect_refusal(lambda pages=pages: self.cache.insert(fresh, np.array(pages, np.int32), namespace))
            expect_refusal(lambda: self.cache.unlock(self.cache.peek(fresh, namespace).node))
            expect_refusal(lambda: self.cache.lock(make_cache(page_size).root(namespace)))
            expect_refusal(lambda: self.cache.evict(-1))
            for node in self.stale:
                expect_refusal(lambda node=node: self.cache.lock(node))

        def make_pages(self, num_pages: int) -> Int32:
            num_new = max(0, num_pages - len(self.free_pages))
            self.free_pages = [*range(self.num_pages_made, self.num_pages_made + num_new), *self.free_pages]
            self.num_pages_made += num_new
            return np.array([self.free_pages.pop() for _ in range(num_pages)], np.int32)

        def hold(self, node: Any, namespace: Namespace, prefix: Prefix, *, is_hit: bool = False) -> None:
            self.handles.append(self.cache.lock(node))
            self.oracle.lock(namespace, prefix, is_hit=is_hit)

        def release_lease(self, index: int) -> None:
            handle = self.handles.pop(index)
            self.cache.unlock(handle)
            self.oracle.unlock(index)
            expect_refusal(lambda: self.cache.unlock(handle))

        def take_back(self, pages: list[int]) -> None:
            """Reuse evicted pages. An evicted prefix may be cached again, but its old handle stays invalid."""
            self.free_pages += pages
            self.stale += [node for node, namespace, prefix in self.peeked if not self.is_cached(namespace, prefix)]
            self.peeked = [peeked for peeked in self.peeked if self.is_cached(*peeked[1:])]

        def is_cached(self, namespace: Namespace, prefix: Prefix) -> bool:
            return not prefix or (namespace, prefix) in self.oracle.pages

    return ConformanceMachine


def prefix_of(symbols: list[int], page_size: int) -> Prefix:
    """Return one page per symbol; pages differ in one token: the first, the last or one in between."""

    def page_tokens(symbol: int) -> PageTokens:
        tokens = [7] * page_size
        tokens[(symbol * max(1, page_size // 2)) % page_size] = symbol
        return tuple(tokens)

    return tuple(page_tokens(symbol) for symbol in symbols)


def tokens_of(prefix: Prefix, num_tail_tokens: int) -> Int32:
    """Return the tokens of a prefix, followed by a partial page."""
    tokens = [token for page in prefix for token in page]
    return np.array(tokens + [7] * num_tail_tokens, np.int32)


def expect_refusal(call: Callable[[], object]) -> None:
    """Raise AssertionError unless `call` raises ValueError."""
    try:
        call()
    except ValueError:
        return
    raise AssertionError("the call must raise ValueError")
