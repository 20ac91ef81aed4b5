"""`check` detects every kind of damage."""

from collections.abc import Callable

import numpy as np
import pytest

from pagewood.radixcache import inspection
from pagewood.radixcache.arrays import from_bytes
from pagewood.radixcache.node import Edge
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.tree import Tree


def build() -> tuple[Tree, Edge, Edge, Edge]:
    """Return a tree of one locked edge with two unlocked children."""
    tree = Tree(1, RecencyList)
    tree.pages.adopt(from_bytes([key(10, 11, 12, 13, 14)]))
    root = tree.root(None)
    stem = tree.attach(root, key(1, 2), key(10, 11))
    left = tree.attach(stem, key(3), key(12))
    right = tree.attach(stem, key(4, 5), key(13, 14))
    tree.lock(stem)
    inspection.check(tree)
    return tree, stem, left, right


def key(*items: int) -> bytes:
    return np.array(items, np.int32).tobytes()


def swap_parent(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    left.parent = right


def move_start(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    right.start += 1
    right.end += 1


def empty_edge(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    left.end = left.start


def cut_key(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    right.key = right.key[:4]


def cut_values(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    right.values = right.values[:4]


def rename(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    left.space = tree.root("other").space


def misfile(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.children[key(9)] = stem.children.pop(key(3))


def misfile_by_two(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.children[key(4, 5)] = stem.children.pop(key(4))


def lose_pin(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.num_leases += 1


def list_twice(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    right.newer = left


def break_link(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    right.older = right


def lose_from_order(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.order.lock(left)


def make_child_younger(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.unlock(stem)
    order = list(tree.order)
    tree.order.lock(left)
    tree.order.unlock(left, order[-1].used)


def repeat_page(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    left.values = key(10)


def lose_page(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.pages.drop(from_bytes([key(12)]))


def tick_back(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    left.used = right.used + 1


def lose_limits(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.space.order = RecencyList()


def miscount(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.num_pages += 1


def miscount_locked(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.num_locked += 1


def miscount_namespace(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.space.num_pages += 1


def keep_idle_root(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.keep(tree.root("idle").space)


def miscount_locked_in_namespace(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    stem.space.num_locked += 1


def misname(tree: Tree, stem: Edge, left: Edge, right: Edge) -> None:
    tree.spaces["other"] = tree.spaces.pop(None)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (swap_parent, "parent of a child must be the edge that holds it"),
        (move_start, "a child must start where its parent ends"),
        (empty_edge, "an edge must hold pages, and a root none"),
        (cut_key, "a key must hold page_size tokens per page"),
        (cut_values, "an edge must hold one page id per page"),
        (rename, "a path must stay in one namespace"),
        (misfile, "the key of a child in children must be its first page"),
        (misfile_by_two, "the key of a child in children must be one page long"),
        (lose_pin, "num_pins must be num_leases plus the locked children"),
        (list_twice, "neighbours in the list must refer to each other"),
        (break_link, "neighbours in the list must refer to each other"),
        (lose_from_order, "the list must contain exactly the unlocked edges"),
        (make_child_younger, "an edge must be older than its parent"),
        (repeat_page, "no page may be in the tree twice"),
        (miscount, "num_pages must be the number of pages"),
        (miscount_locked, "num_locked must be the number of pages of locked edges"),
        (miscount_namespace, "num_pages of a namespace must be the number of its pages"),
        (miscount_locked_in_namespace, "num_locked of a namespace must be the number of its locked pages"),
        (misname, "a namespace must be stored under its name"),
        (lose_page, "pages must hold exactly the pages of the tree"),
        (tick_back, "ticks must rise along the list"),
        (lose_limits, "the list must contain exactly the unlocked edges"),
        (keep_idle_root, "a namespace must have a page, a lease or a limit"),
    ],
)
def test_damage_is_detected(damage: Callable[[Tree, Edge, Edge, Edge], None], rule: str) -> None:
    tree, stem, left, right = build()
    damage(tree, stem, left, right)
    with pytest.raises(AssertionError, match=f"^{rule}"):
        inspection.check(tree)
