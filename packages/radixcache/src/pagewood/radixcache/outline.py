"""An outline of the tree: its largest branches, found by a walk of bounded length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from pagewood.radixcache.arrays import Int32, from_bytes
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Edge
from pagewood.radixcache.tree import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A run of pages of the outline, and what follows it in the tree.

    Attributes:
        namespace: the namespace of the run.
        parent: index of the branch that it follows; -1 at the start of a sequence. It is lower than the branch's own.
        num_parent_pages: number of pages before it on its path.
        tokens: `[len(pages) * page_size] int32`, token ids, read-only.
        pages: `[> 0] int32`, page ids, read-only.
        num_pages: pages of the run and of all that the walk has found after it.
        num_children: runs that follow it directly.
        num_leases: leases that end in it or in what the walk has found after it.
        is_locked: whether a lease ends at its last page or below it.
        idle: operations on the cache since it was last used; 0 if it is locked.
    """

    namespace: Namespace
    parent: int
    num_parent_pages: int
    tokens: Int32
    pages: Int32
    num_pages: int
    num_children: int
    num_leases: int
    is_locked: bool
    idle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The largest branches of a tree. Invariant: a branch comes after the one that it follows.

    Attributes:
        branches: with what follows them, the largest first.
        num_runs: runs that the walk has seen, or that were counted as children of those.
        is_complete: whether the walk has seen the whole tree; if not, the deepest runs are missing, also in the sums.
    """

    branches: list[Branch]
    num_runs: int
    is_complete: bool


def outline(tree: Tree, *, max_branches: int, max_visited: int) -> Outline:
    """Return the branches with the most pages; visits the runs nearest to the roots first, `max_visited` at most."""
    edges, is_complete = _nearest(tree, max_visited)
    places = {id(edge): place for place, edge in enumerate(edges)}
    num_pages = [edge.end - edge.start for edge in edges]
    num_leases = [edge.num_leases for edge in edges]
    parents = [places.get(id(edge.parent), -1) for edge in edges]
    for place in range(len(edges) - 1, -1, -1):  # children come after their parents, so each sum is complete here
        parent = parents[place]
        if parent >= 0:
            num_pages[parent] += num_pages[place]
            num_leases[parent] += num_leases[place]
    # A sum is no larger than the parent's, and the sort is stable: each branch comes after the one that it follows.
    largest = sorted(range(len(edges)), key=lambda place: -num_pages[place])[:max_branches]
    ranks = {place: rank for rank, place in enumerate(largest)}
    branches = [
        _branch(tree, edges[place], ranks.get(parents[place], -1), num_pages[place], num_leases[place])
        for place in largest
    ]
    num_unseen = 0 if is_complete else sum(len(edge.children) for edge in edges) - sum(one >= 0 for one in parents)
    return Outline(branches=branches, num_runs=len(edges) + num_unseen, is_complete=is_complete)


def _nearest(tree: Tree, max_visited: int) -> tuple[list[Edge], bool]:
    """Return up to `max_visited` edges in the order of their depth, without roots, and whether these are all."""
    found: list[Edge] = []
    levels: deque[Iterator[Edge]] = deque(
        [chain.from_iterable(space.root.children.values() for space in tree.spaces.values())]
    )
    while levels:
        for edge in levels.popleft():
            if len(found) == max_visited:
                return found, False
            found.append(edge)
            if edge.children:
                levels.append(iter(edge.children.values()))
    return found, True


def _branch(tree: Tree, edge: Edge, parent: int, num_pages: int, num_leases: int) -> Branch:
    used = edge.used if edge.usage is None else edge.usage.last_used
    return Branch(
        namespace=edge.space.name,
        parent=parent,
        num_parent_pages=edge.start,
        tokens=from_bytes([edge.key]),
        pages=from_bytes([edge.values]),
        num_pages=num_pages,
        num_children=len(edge.children),
        num_leases=num_leases,
        is_locked=edge.num_pins > 0,
        idle=0 if edge.num_pins else max(0, tree.now - used),
    )
