"""The cost and the effect of the tree's operations, as far as the interface of the cache does not show them."""

import numpy as np

from pagewood.radixcache.node import Edge
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.tree import MAX_JOINED_BYTES, Tree


def ids(*items: int) -> bytes:
    return np.array(items, np.int32).tobytes()


def build() -> tuple[Tree, Edge, Edge]:
    """Return a tree with one path of two edges."""
    tree = Tree(1, RecencyList)
    upper = tree.attach(tree.root(None), ids(1, 2), ids(10, 11))
    lower = tree.attach(upper, ids(3, 4, 5), ids(12, 13, 14))
    tree.order.touch(lower, tree.tick())
    return tree, upper, lower


def test_a_lock_stops_at_the_first_locked_edge() -> None:
    tree, upper, lower = build()
    tree.lock(lower)
    tree.lock(lower)
    assert (lower.num_pins, upper.num_pins, tree.root(None).num_pins) == (2, 1, 1)
    tree.unlock(lower)
    assert (lower.num_pins, upper.num_pins, tree.num_locked) == (1, 1, 5)


def test_a_split_keeps_the_object_of_the_lower_part() -> None:
    tree, upper, lower = build()
    tree.lock(lower)
    middle = tree.split(lower, 4)
    assert (middle.start, middle.end, lower.start, lower.end) == (2, 4, 4, 5)
    assert (middle.num_leases, middle.num_pins, lower.num_leases) == (0, 1, 1)
    assert lower.parent is middle
    assert middle.parent is upper
    assert (middle.values, lower.values) == (ids(12, 13), ids(14))


def test_descend_returns_how_far_it_came() -> None:
    tree, upper, lower = build()
    root = tree.root(None)
    assert tree.descend(root, ids(9)) == (root, 0, [])
    assert tree.descend(root, ids(1, 9)) == (upper, 1, [ids(10)])
    assert tree.descend(root, ids(1, 2)) == (upper, 2, [ids(10, 11)])
    assert tree.descend(upper, ids(3, 4)) == (lower, 2, [ids(12, 13)])
    assert tree.descend(root, ids(1, 2, 3, 4, 5, 6)) == (lower, 5, [ids(10, 11), ids(12, 13, 14)])


def test_descend_does_not_read_the_prefix_before_its_start() -> None:
    tree, upper, lower = build()
    upper.key = b"never read"
    assert tree.descend(upper, ids(3, 4, 5)) == (lower, 3, [ids(12, 13, 14)])


def test_an_evicted_edge_is_left_empty() -> None:
    tree, upper, lower = build()
    assert tree.detach(lower) == ids(12, 13, 14)
    assert upper.children == {}
    assert lower.start == lower.end


def test_a_chain_is_joined_when_it_is_unlocked() -> None:
    tree, upper, lower = build()
    tree.lock(lower)
    tree.unlock(lower)
    assert (upper.key, upper.values, upper.start, upper.end) == (ids(1, 2, 3, 4, 5), ids(10, 11, 12, 13, 14), 0, 5)
    assert upper.children == {}
    assert list(tree.order) == [upper]


def test_a_chain_is_joined_up_to_a_size() -> None:
    tree, num_pages = Tree(1, RecencyList), MAX_JOINED_BYTES // 16 + 1
    edges = [tree.root(None)]
    for number in range(4):
        tokens = np.arange(number * num_pages, (number + 1) * num_pages, dtype=np.int32).tobytes()
        edges.append(tree.attach(edges[-1], tokens, tokens))
    tree.lock(edges[-1])
    tree.unlock(edges[-1])
    assert [edge.end - edge.start for edge in tree.order] == [num_pages] * 4
    tree, upper, lower = build()
    assert (upper.end, lower.end) == (2, 5)


def test_a_trimmed_edge_is_not_joined_with_its_child() -> None:
    tree, upper, lower = build()
    tree.trim(lower, 4)
    tree.lock(lower)
    leaf = tree.attach(lower, ids(9), ids(20))
    tree.unlock(lower)
    assert leaf.start == 4
    assert list(tree.order) == [leaf, upper]  # the trimmed edge is now the end of `upper`
    assert upper.is_trimmed
