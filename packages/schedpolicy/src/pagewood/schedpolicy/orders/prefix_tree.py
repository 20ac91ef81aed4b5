"""A radix tree of waiting requests by their cached prefixes, the heaviest subtree first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic

from pagewood.schedpolicy.orders.order import W, absent, changed_during_pass

_ITEM_BYTES = 4


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One edge and the subtree below it.

    Invariant: every node except the root has a request of its own or at least two children; `arrivals` has all
    requests at and below the node.
    """

    edge: bytes  # written by: prefix_tree
    parent: Node | None  # written by: prefix_tree
    children: dict[bytes, Node] = field(default_factory=dict[bytes, "Node"])  # by first item; written by: prefix_tree
    ranked: list[tuple[int, int, Node]] = field(default_factory=list[tuple[int, int, "Node"]])
    """The children as (-weight, oldest arrival, child), sorted."""  # written by: prefix_tree
    arrivals: list[int] = field(default_factory=list[int])  # sorted; written by: prefix_tree
    own: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    """Requests whose prefix ends here, as (arrival, request), sorted."""  # written by: prefix_tree

    @property
    def rank(self) -> tuple[int, int]:
        """Its rank among its siblings: most requests first, then the oldest request."""
        return -len(self.arrivals), self.arrivals[0]


class PrefixTree(Generic[W]):
    """Requests by prefix. Invariant: the tree is compressed, and the children of every node are ranked.

    Adding or removing a request costs a few binary searches for each node on its path.
    """

    __slots__ = ("_nodes", "_num_changes", "_root")

    def __init__(self) -> None:
        self._root = Node(edge=b"", parent=None)
        self._nodes: dict[int, Node] = {}  # where each request rests, by arrival; written by: add, discard
        self._num_changes = 0  # written by: add, discard

    def add(self, request: W, prefix: bytes) -> None:
        """Add a request with its prefix, a multiple of four bytes.

        Raises:
            ValueError: A request with the same `arrival` is already here.
        """
        arrival = request.arrival
        if arrival in self._nodes:
            raise ValueError(f"arrival must be unique among waiting requests, got {arrival} again")
        self._num_changes += 1
        node, num_walked = self._root, 0
        while num_walked < len(prefix):
            child = node.children.get(prefix[num_walked : num_walked + _ITEM_BYTES])
            if child is None:
                child = self._grow(node, prefix[num_walked:])
            elif not prefix.startswith(child.edge, num_walked):
                child = self._split(child, prefix[num_walked : num_walked + len(child.edge)])
            node = child
            num_walked += len(node.edge)
        self._nodes[arrival] = node
        insort(node.own, (arrival, request))
        self._count(node, arrival)

    def discard(self, request: W) -> None:
        """Remove a request.

        Raises:
            KeyError: The request is not here.
        """
        arrival = request.arrival
        node = self._nodes.pop(arrival, None)
        if node is None:
            raise absent(request)
        self._num_changes += 1
        del node.own[bisect_left(node.own, (arrival,))]
        self._uncount(node, arrival)
        if node.parent is not None and not node.arrivals:
            del node.parent.children[node.edge[:_ITEM_BYTES]]
            node = node.parent
        if node.parent is not None and not node.own and len(node.children) == 1:
            self._merge(node)

    def __iter__(self) -> Iterator[W]:
        """Yield the requests: heaviest subtrees first, each before its node's own requests, then by arrival.

        Raises:
            RuntimeError: A request was added or removed during the iteration.
        """
        num_changes = self._num_changes
        pending = [(self._root, iter(self._root.ranked))]
        while pending:
            node, children = pending[-1]
            entry = next(children, None)
            if entry is not None:
                pending.append((entry[2], iter(entry[2].ranked)))
                continue
            pending.pop()
            for _, request in node.own:
                yield request
                if self._num_changes != num_changes:
                    raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is here."""
        return request.arrival in self._nodes

    def __len__(self) -> int:
        """Return the number of requests here."""
        return len(self._nodes)

    def _grow(self, parent: Node, edge: bytes) -> Node:
        """Return a new leaf, which is not yet ranked."""
        leaf = Node(edge=edge, parent=parent)
        parent.children[edge[:_ITEM_BYTES]] = leaf
        return leaf

    def _split(self, node: Node, other: bytes) -> Node:
        """Split an edge where it differs from `other`; return the new middle node, which has the same rank."""
        parent = node.parent
        assert parent is not None
        num_shared = _num_shared(node.edge, other)
        middle = Node(edge=node.edge[:num_shared], parent=parent, arrivals=node.arrivals.copy())
        middle.children[node.edge[num_shared : num_shared + _ITEM_BYTES]] = node
        middle.ranked.append((*node.rank, node))
        self._replace(parent, node, middle)
        node.edge = node.edge[num_shared:]
        node.parent = middle
        return middle

    def _merge(self, node: Node) -> None:
        """Remove a node with a single child from the path; the child takes its rank."""
        (child,) = node.children.values()
        assert node.parent is not None
        self._replace(node.parent, node, child)
        child.edge = node.edge + child.edge
        child.parent = node.parent

    def _replace(self, parent: Node, old: Node, new: Node) -> None:
        """Replace a node by one of the same rank."""
        parent.children[old.edge[:_ITEM_BYTES]] = new
        place = bisect_left(parent.ranked, old.rank)
        parent.ranked[place] = (*old.rank, new)

    def _count(self, node: Node, arrival: int) -> None:
        """Add a request to the counts of its node and all nodes above."""
        at: Node | None = node
        while at is not None:
            parent = at.parent
            if parent is not None and at.arrivals:
                del parent.ranked[bisect_left(parent.ranked, at.rank)]
            insort(at.arrivals, arrival)
            if parent is not None:
                insort(parent.ranked, (*at.rank, at))
            at = parent

    def _uncount(self, node: Node, arrival: int) -> None:
        """Remove a request from the counts of its node and all nodes above."""
        at: Node | None = node
        while at is not None:
            parent = at.parent
            if parent is not None:
                del parent.ranked[bisect_left(parent.ranked, at.rank)]
            del at.arrivals[bisect_left(at.arrivals, arrival)]
            if parent is not None and at.arrivals:
                insort(parent.ranked, (*at.rank, at))
            at = parent


def _num_shared(a: bytes, b: bytes) -> int:
    """Return the length in bytes of the longest common prefix of whole items."""
    least, most = 0, min(len(a), len(b)) // _ITEM_BYTES
    while least < most:
        middle = (least + most + 1) // 2
        if a[least * _ITEM_BYTES : middle * _ITEM_BYTES] == b[least * _ITEM_BYTES : middle * _ITEM_BYTES]:
            least = middle
        else:
            most = middle - 1
    return least * _ITEM_BYTES
