"""The conformance machine passes `RadixCache`, and catches one seeded fault after the other."""

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test  # pyright: ignore[reportUnknownVariableType]

from pagewood.radixcache import Node, RadixCache
from pagewood.radixcache.lru import LeafLRU
from pagewood.radixcache.node import Edge
from pagewood.radixcache.testing import Oracle, conformance_machine
from pagewood.radixcache.tree import Tree

SETTINGS = hypothesis.settings(max_examples=250, stateful_step_count=40, deadline=None)
FAULT_SETTINGS = hypothesis.settings(
    max_examples=1000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_radix_cache_conforms(page_size: int) -> None:
    run_state_machine_as_test(conformance_machine(RadixCache, page_size=page_size), settings=SETTINGS)


def never_touch(lru: LeafLRU, edge: Edge) -> None:
    pass


split, root, unlock = Tree.split, Tree.root, Tree.unlock


def evict_whole_edges(tree: Tree, num_pages: int) -> list[bytes]:
    parts: list[bytes] = []
    while num_pages > 0 and (edge := tree.lru.oldest()) is not None:
        parts.append(edge.values)
        num_pages -= edge.end - edge.start
        tree.detach(edge)
    return parts


def lock_last_edge(tree: Tree, edge: Edge) -> None:
    edge.num_leases += 1
    edge.num_pins += 1
    if edge.num_pins == 1 and edge.parent is not None:
        tree.lru.remove(edge)
        tree.num_locked += edge.end - edge.start


def unlock_untouched(tree: Tree, edge: Edge) -> None:
    """Like `Tree.unlock`, but what is unlocked becomes the least recent."""
    recent = list(tree.lru)
    unlock(tree, edge)
    for other in recent:
        tree.lru.remove(other)
        tree.lru.add(other)


def locate_without_walk(tree: Tree, node: Node) -> Edge:
    return node.edge if node.end else tree.root(node.namespace)


def split_unlocked(tree: Tree, edge: Edge, end: int) -> Edge:
    upper = split(tree, edge, end)
    if upper.num_pins:
        upper.num_pins = 0
        tree.lru.add(upper)
    return upper


def root_of_all(tree: Tree, namespace: str | None) -> Edge:
    return tree.roots.get(None) or root(tree, namespace)


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "recency is never updated": (LeafLRU, "touch", never_touch),
    "more is evicted than asked": (Tree, "evict", evict_whole_edges),
    "a lease locks its last edge only": (Tree, "lock", lock_last_edge),
    "unlocking is no use": (Tree, "unlock", unlock_untouched),
    "a handle is lost at a split": (Tree, "locate", locate_without_walk),
    "a split loses the lock": (Tree, "split", split_unlocked),
    "namespaces share a root": (Tree, "root", root_of_all),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, faulty = FAULTS[fault]
    monkeypatch.setattr(owner, name, faulty)
    monkeypatch.setattr(RadixCache, "check", lambda cache: None)  # pyright: ignore  # it must show in what the cache does
    with pytest.raises((AssertionError, ValueError, KeyError, AttributeError)):
        run_state_machine_as_test(conformance_machine(RadixCache, page_size=2), settings=FAULT_SETTINGS)


def test_oracle_evicts_the_least_recently_used_leaf() -> None:
    oracle = Oracle()
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
