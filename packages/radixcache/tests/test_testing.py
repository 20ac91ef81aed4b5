"""The conformance machine passes `RadixCache` under every policy, and detects each seeded fault."""

import inspect
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis.stateful import run_state_machine_as_test  # pyright: ignore[reportUnknownVariableType]

from pagewood.radixcache import LRU, RadixCache
from pagewood.radixcache import eviction as eviction_module
from pagewood.radixcache.arrays import from_bytes
from pagewood.radixcache.eviction import Limits
from pagewood.radixcache.history import History
from pagewood.radixcache.node import Edge, Node, Space
from pagewood.radixcache.order.choice import AnyPolicy
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.order.scored import Scored
from pagewood.radixcache.pages import PageSet
from pagewood.radixcache.policies import Policy
from pagewood.radixcache.snapshots import Snapshots
from pagewood.radixcache.testing import ManualClock, Oracle, conformance_machine, soak
from pagewood.radixcache.tree import Tree
from pagewood.radixcache.watches import Watch, Watches, WatchGroup

SETTINGS = hypothesis.settings(max_examples=10, stateful_step_count=50, deadline=None)
SOAK = runpy.run_path(str(Path(__file__).with_name("soak.py")))
CLOCK: ManualClock = SOAK["CLOCK"]
POLICIES: dict[str, Callable[[], AnyPolicy]] = SOAK["POLICIES"]


def machine(policy: str, page_size: int) -> Any:
    make_policy = POLICIES[policy]
    return conformance_machine(
        lambda page_size: RadixCache(page_size, policy=make_policy(), history_tokens=100_000),
        page_size=page_size,
        make_policy=make_policy,
        clock=CLOCK if "priority" in policy else None,
        remembers_all=True,
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_radix_cache_conforms(policy: str, page_size: int) -> None:
    run_state_machine_as_test(machine(policy, page_size), settings=SETTINGS)


def do_nothing(*arguments: object) -> None:
    pass


def return_zero(*arguments: object) -> int:
    return 0


def return_true(*arguments: object) -> bool:
    return True


split, root, detach, grow, close = Tree.split, Tree.root, Tree.detach, Tree.grow, Watches.close
attach, cut, evict_snapshots = Snapshots.attach, Snapshots.cut, Snapshots.evict


def evict_whole_edges(tree: Tree, limits: Limits, num_pages: int, beneficiary: str | None) -> list[bytes]:
    parts: list[bytes] = []
    while num_pages > 0 and (edge := tree.order.first()) is not None:
        num_pages -= edge.end - edge.start
        parts.append(tree.detach(edge))
    return parts


def lock_last_edge(tree: Tree, edge: Edge) -> None:
    edge.num_leases += 1
    edge.num_pins += 1
    if edge.num_pins == 1 and edge.parent is not None:
        edge.space.order.lock(edge)
        tree.num_locked += edge.end - edge.start


def unlock_untouched(order: RecencyList, edge: Edge, now: int) -> None:
    """Like `RecencyList.unlock`, but the unlocked edge becomes the least recent one."""
    recent = list(order)
    RecencyList.adopt(order, edge, now)
    for other in recent:
        order.lock(other)
        RecencyList.adopt(order, other, now)


def locate_without_walk(tree: Tree, node: Node) -> Edge:
    return node.edge if node.end else tree.root(node.namespace)


def split_unlocked(tree: Tree, edge: Edge, end: int) -> Edge:
    upper = split(tree, edge, end)
    if upper.num_pins:
        upper.num_pins = 0
        RecencyList.adopt(upper.space.order, upper, 0)  # pyright: ignore[reportArgumentType]
    return upper


def grow_under_two_leases(tree: Tree, edge: Edge, key: bytes, values: bytes) -> bool:
    num_leases, edge.num_leases = edge.num_leases, 1
    is_grown = grow(tree, edge, key, values)
    edge.num_leases = num_leases
    return is_grown


def grow_trimmed(tree: Tree, edge: Edge, key: bytes, values: bytes) -> bool:
    edge.is_trimmed = False
    return grow(tree, edge, key, values)


def root_of_all(tree: Tree, namespace: str | None) -> Edge:
    space = tree.spaces.get("a")
    return space.root if space else root(tree, namespace)


def cut_nowhere(order: Scored, edge: Edge) -> int:
    return edge.start


def adopt_unchecked(pages: PageSet, added: Any) -> None:
    pages._marks[added] = 1  # pyright: ignore[reportPrivateUsage]


def ignore_limits(limits: Limits, tree: Tree, beneficiary: str | None) -> tuple[Any, int]:
    orders = [order for order in [tree.order, *(space.order for space in limits.spaces)] if order.first()]
    return min(orders, key=lambda order: order.head(), default=None), 1


def release_below_only(tree: Tree, edge: Edge, *, keeps_longer: bool) -> list[bytes]:
    edges = eviction_module.subtree(edge)[1:]
    return [detach(tree, each) for each in reversed(edges) if not each.num_pins]


def move_all_watches(watches: Watches, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
    """Move every watch at the place forward by the whole run."""
    place = space.name if parent_page is None else parent_page
    for group in list(watches._waiting.get(place, {}).values()):  # pyright: ignore[reportPrivateUsage]
        for watch in list(group):
            watch.num_tokens += len(values) // 4 * watches._page_size  # pyright: ignore[reportPrivateUsage]


def move_unnoted(watches: Watches, watch: Watch, num_pages: int, place: Any) -> None:
    watches._rest(watch, num_pages, place)  # pyright: ignore[reportPrivateUsage]


def note_last_first(watches: Watches, watch: Watch, num_pages: int, place: Any) -> None:
    if watch.notes is not None:
        others = {other: watch.notes.pop(other) for other in list(watch.notes)}
        watch.notes.update({watch: watch.owner, **others})
    move_unnoted(watches, watch, num_pages, place)


def changed_without_clearing(group: WatchGroup[int]) -> list[int]:
    return list(group._notes.values())  # pyright: ignore[reportPrivateUsage]


def close_with_note(watches: Watches, watch: Watch) -> None:
    notes = dict(watch.notes or {})
    close(watches, watch)
    if watch.notes is not None:
        watch.notes.update(notes)


def evict_locked(snapshots: Snapshots, tree: Tree, num_snapshots: int) -> list[int]:
    unlocked: Any = SimpleNamespace(locate=lambda node: tree.root("no lease"))  # pyright: ignore[reportUnknownLambdaType]
    return evict_snapshots(snapshots, unlocked, num_snapshots)


def forget_evicted(snapshots: Snapshots, tree: Tree, num_snapshots: int) -> list[int]:
    freed = evict_snapshots(snapshots, tree, num_snapshots)
    for page in snapshots._evicted_at_s:  # pyright: ignore[reportPrivateUsage]
        snapshots._is_place[page] = False  # pyright: ignore[reportPrivateUsage]
    snapshots._evicted_at_s.clear()  # pyright: ignore[reportPrivateUsage]
    return freed


def return_loose_twice(snapshots: Snapshots, tree: Tree, num_snapshots: int) -> list[int]:
    loose = list(snapshots._loose)  # pyright: ignore[reportPrivateUsage]
    freed = evict_snapshots(snapshots, tree, num_snapshots)
    snapshots._loose += loose  # pyright: ignore[reportPrivateUsage]
    return freed


def supersede_across_branches(snapshots: Snapshots, edge: Edge, end: int) -> None:
    parent = edge.parent
    while parent is not None:
        for page in reversed(from_bytes([parent.values]).tolist()):
            others = snapshots._others  # pyright: ignore[reportPrivateUsage]
            if page in others:
                snapshots._superseded[page] = others.pop(page)  # pyright: ignore[reportPrivateUsage]
                return
        parent = parent.parent


def cut_nothing(snapshots: Snapshots, edge: Edge, parts: list[bytes], *, is_use: bool) -> Any:
    return edge, len(b"".join(parts)) // 4, parts


def cut_without_use(snapshots: Snapshots, edge: Edge, parts: list[bytes], *, is_use: bool) -> Any:
    return cut(snapshots, edge, parts, is_use=False)


def attach_again(snapshots: Snapshots, edge: Edge, end: int, snapshot: int) -> bool:
    page = from_bytes([edge.values]).tolist()[end - edge.start - 1]
    if snapshots.at(edge, end) is not None:
        snapshots._take(page)  # pyright: ignore[reportPrivateUsage]
    return attach(snapshots, edge, end, snapshot)


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "recency is never updated by inserts": ("LRU", RecencyList, "publish", do_nothing),
    "more is evicted than requested": ("LRU", eviction_module, "evict", evict_whole_edges),
    "a lease locks only its last edge": ("LRU", Tree, "lock", lock_last_edge),
    "unlocking is not a use": ("LRU", RecencyList, "unlock", unlock_untouched),
    "a handle is lost at a split": ("LRU", Tree, "locate", locate_without_walk),
    "a split loses the lock": ("LRU", Tree, "split", split_unlocked),
    "the lease of another request covers pages that were appended": ("LRU", Tree, "grow", grow_under_two_leases),
    "pages are appended where others were evicted": ("LRU", Tree, "grow", grow_trimmed),
    "namespaces share a root": ("LRU", Tree, "root", root_of_all),
    "edges that are not neighbours in the order are joined": ("LRU", RecencyList, "can_absorb", return_true),
    "overlapping pages are adopted": ("LRU", PageSet, "adopt", adopt_unchecked),
    "removed pages stay in the page set": ("LRU", PageSet, "drop", do_nothing),
    "release frees only the pages after the prefix": ("LRU", eviction_module, "release", release_below_only),
    "limits are ignored": ("LRU", Limits, "next", ignore_limits),
    "floors are not counted": ("LRU", Limits, "num_guarded", return_zero),
    "watches do not move forward": ("LRU", Watches, "stored", do_nothing),
    "watches move too far": ("LRU", Watches, "stored", move_all_watches),
    "watches do not move up": ("LRU", Watches, "removed", do_nothing),
    "a change is not reported": ("LRU", Watches, "_move", move_unnoted),
    "the last change is reported first": ("LRU", Watches, "_move", note_last_first),
    "a change is reported twice": ("LRU", WatchGroup, "changed", changed_without_clearing),
    "a closed watch is reported": ("LRU", Watches, "close", close_with_note),
    "cached runs stay in the history": ("LRU", History, "stored", do_nothing),
    "the history stays empty": ("LRU", History, "removed", do_nothing),
    "hits are not counted": ("LFU", Scored, "hit", do_nothing),
    "uses are not recorded": ("LFU", Scored, "_use", do_nothing),
    "a run is evicted as a whole": ("tail-optimised", Scored, "cut", cut_nowhere),
    "priorities never end": ("priority and TTL", Scored, "_await_deadlines", do_nothing),
    "a parent without children does not become a leaf": ("FIFO", Scored, "expose", do_nothing),
    "watched pages are evicted like any other": ("queue-informed", Watches, "watched_end", return_zero),
    "S3-FIFO evicts locked pages": ("S3-FIFO", Edge, "is_free_leaf", property(return_true)),
}


SNAPSHOT_FAULTS: dict[str, tuple[str, Any]] = {
    "snapshots of removed pages are lost": ("removed", do_nothing),
    "snapshots of removed pages are returned twice": ("evict", return_loose_twice),
    "snapshots of locked prefixes are evicted": ("evict", evict_locked),
    "an evicted snapshot is not remembered": ("evict", forget_evicted),
    "a replaced snapshot is lost": ("attach", attach_again),
    "superseded snapshots are evicted like any other": ("_supersede", do_nothing),
    "a snapshot at a branch point is superseded": ("_supersede", supersede_across_branches),
    "a match ends where no snapshot is": ("cut", cut_nothing),
    "a match does not use its snapshot": ("cut", cut_without_use),
    "an offered snapshot does not use the one there": ("use", do_nothing),
}
SNAPSHOT_RULES = ("insert", "lease", "unlock", "attach", "evict_one", "evict_snapshots", "look")


@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS)
def test_a_seeded_fault_of_snapshots_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, faulty = SNAPSHOT_FAULTS[fault]
    monkeypatch.setattr(Snapshots, name, faulty)
    monkeypatch.setattr(RadixCache, "check", do_nothing)  # the fault must show in the behaviour
    run = partial(soak, page_size=2, num_steps=8000, seed=1, check_every=4, max_leases=5, rules=SNAPSHOT_RULES)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        run(machine("LRU", 2))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, owner, name, faulty = FAULTS[fault]
    if not isinstance(inspect.getattr_static(owner, name), FunctionType | property):
        pytest.skip("compiled code calls its functions directly, so none can be replaced")
    monkeypatch.setattr(owner, name, faulty)
    monkeypatch.setattr(RadixCache, "check", do_nothing)  # the fault must show in the behaviour
    with pytest.raises((AssertionError, ValueError, KeyError, AttributeError, IndexError, RecursionError)):
        soak(machine(policy, 2), page_size=2, num_steps=20_000, seed=1, check_every=4, max_leases=6)


class Minimal:
    """A cache that has only what the Protocol requires."""

    def __init__(self, page_size: int) -> None:
        cache = RadixCache(page_size)
        self.match, self.peek, self.root, self.insert = cache.match, cache.peek, cache.root, cache.insert
        self.lock, self.unlock, self.clear, self.check = cache.lock, cache.unlock, cache.clear, cache.check
        self.evict, self.num_pages_in = partial(cache.evict), cache.num_pages_in
        self._cache = cache

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    @property
    def num_locked(self) -> int:
        return self._cache.num_locked

    @property
    def num_evictable(self) -> int:
        return self._cache.num_evictable


@pytest.mark.parametrize("policy", ["LRU", "queue-informed priority"])
def test_soak_runs_many_steps(policy: str) -> None:
    soak(machine(policy, 3), page_size=3, num_steps=1500, seed=0, check_every=50)


def test_the_protocol_alone_is_enough() -> None:
    run_state_machine_as_test(conformance_machine(Minimal, page_size=4), settings=SETTINGS)


def test_oracle_evicts_the_least_recently_used_leaf() -> None:
    oracle = Oracle(1, LRU())
    a, b, c = ((1,),), ((1,), (2,)), ((3,),)
    oracle.insert(None, b, [10, 11])
    oracle.insert(None, c, [12])
    assert oracle.match(None, b) == [10, 11]
    oracle.touch(None, a)
    assert oracle.evict(2) == [11, 12]
    oracle.leases.append((None, a))
    assert oracle.evict(9) == []
    assert oracle.num_locked() == 1
    oracle.unlock(0)
    assert oracle.clear("other") == []
    assert oracle.clear(None) == [10]
    with pytest.raises(KeyError):
        oracle.remove([10])


def test_a_custom_policy_is_followed() -> None:
    class Longest(Policy):
        def score(self, usage: object, num_tokens: int) -> int:
            return -num_tokens

    cache = RadixCache(1, policy=Longest())
    cache.insert(np.array([1, 2, 3], np.int32), np.array([1, 2, 3], np.int32))
    cache.insert(np.array([5, 6], np.int32), np.array([5, 6], np.int32))
    assert cache.evict(1).tolist() == [3]
    cache.check()
