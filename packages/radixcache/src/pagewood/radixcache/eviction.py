"""Eviction under the limits of namespaces, and `clear` and `release`, which do not follow the eviction order."""

from pagewood.radixcache.namespaces import AnyNamespace, Namespace
from pagewood.radixcache.node import Edge, Space
from pagewood.radixcache.order import Order
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.tree import Tree


class Limits:
    """The namespaces that have limits; each has its own eviction order, and all others share one.

    Invariant: `spaces` are the namespaces of the tree whose `is_limited` is true.
    """

    __slots__ = ("spaces",)

    def __init__(self) -> None:
        self.spaces: list[Space] = []  # written by: set

    def set(self, tree: Tree, space: Space, quota: int | None, floor: int) -> None:
        """Set the limits of a namespace; the first call moves it to its own order, in time proportional to its size."""
        tree.keep(space)
        space.quota, space.floor = quota, floor
        if not space.is_limited:
            order = tree.make_order()
            order.take_over(space.order, subtree(space.root)[1:])
            for each in (order, *(other.order for other in self.spaces), tree.order):
                if isinstance(each, RecencyList):
                    each.is_only_order = False
            space.order, space.is_limited = order, True
            self.spaces.append(space)

    def num_guarded(self) -> int:
        """Return the number of unlocked pages that floors protect from eviction."""
        num_pages = 0
        for space in self.spaces:
            num_unlocked, num_above = space.num_pages - space.num_locked, max(0, space.num_pages - space.floor)
            num_pages += max(0, num_unlocked - num_above)
        return num_pages

    def next(self, tree: Tree, beneficiary: Namespace | AnyNamespace) -> tuple[Order | None, int]:
        """Return the order to evict from next, and how many pages may be taken before calling this again."""
        turns = [
            (space.order, space.num_pages - space.quota)
            for space in self.spaces
            if space.quota is not None and space.num_pages > space.quota and space.order.first()
        ]
        if not turns:
            floors = [(space, 0 if space.name == beneficiary else space.floor) for space in self.spaces]
            turns = [
                (space.order, space.num_pages - floor)
                for space, floor in floors
                if space.num_pages > floor and space.order.first()
            ]
            if tree.order.first():
                turns.append((tree.order, tree.num_pages))
        return min(turns, key=lambda turn: turn[0].head(), default=(None, 0))


def evict(tree: Tree, limits: Limits, num_pages: int, beneficiary: Namespace | AnyNamespace) -> list[bytes]:
    """Evict the first `num_pages` pages of the order, or as many as can be evicted, and return their ids.

    Raises:
        Exception: what the policy has raised, if nothing was evicted before.
    """
    parts: list[bytes] = []
    order: Order | None = tree.order
    num_turn = num_pages
    while num_pages:
        try:
            if limits.spaces:
                order, num_turn = limits.next(tree, beneficiary)
            edge = order.first() if order else None
            if order is None or edge is None:
                break
            end = max(order.cut(edge), edge.end - min(num_turn, num_pages))
        except Exception:  # of the policy
            if parts:
                break  # the caller must get the pages evicted so far; the next call raises
            raise
        num_pages -= edge.end - end
        if end == edge.start:
            parts.append(tree.detach(edge))
        else:
            parts.append(tree.trim(edge, end))
        num_turn = num_pages
    return parts


def clear(tree: Tree, space: Space) -> list[bytes]:
    """Remove all unlocked pages of a namespace, and return their ids."""
    parts = _drop_all(tree, subtree(space.root)[1:])
    for listener in tree.listeners:
        listener.cleared(space)
    return parts


def release(tree: Tree, edge: Edge, *, keeps_longer: bool) -> list[bytes]:
    """Remove the unlocked pages after `edge`, then those before its end that nothing else needs; return their ids.

    With `keeps_longer`, nothing after `edge` is removed.
    """
    parts = [] if keeps_longer else _drop_all(tree, subtree(edge)[1:])
    while edge.is_free_leaf and edge.parent is not None:
        parent = edge.parent
        parts.append(tree.detach(edge))
        edge = parent
    return parts


def subtree(edge: Edge) -> list[Edge]:
    """Return an edge and everything below it, parents first."""
    edges = [edge]
    for each in edges:
        edges.extend(each.children.values())
    return edges


def _drop_all(tree: Tree, edges: list[Edge]) -> list[bytes]:
    return [tree.detach(edge) for edge in reversed(edges) if not edge.num_pins]  # children before parents
