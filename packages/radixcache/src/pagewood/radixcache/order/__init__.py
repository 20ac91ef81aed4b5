"""The order in which unlocked pages are evicted, kept up to date while the tree changes."""

from collections.abc import Iterator
from typing import Any, Protocol

from pagewood.radixcache.node import Edge


class Order(Protocol):
    """A total order over the unlocked leaves of one or more namespaces. The tree reports every change to it.

    `now` is the tree's tick. Changes along a path are reported from the deepest edge upwards. No method changes the
    tree.
    """

    def adopt(self, edge: Edge, now: int) -> None:
        """A new leaf was added, unlocked; `publish` of its path follows."""
        ...

    def publish(self, edge: Edge, now: int) -> None:
        """A sequence that ends with `edge` was inserted, so its whole path was used."""
        ...

    def touch(self, edge: Edge, now: int) -> None:
        """The path that ends with `edge` was used; only its unlocked part matters."""
        ...

    def hit(self, edge: Edge) -> None:
        """A match of the prefix that ends with `edge` was locked."""
        ...

    def lock(self, edge: Edge) -> None:
        """An edge of the order was locked."""
        ...

    def unlock(self, edge: Edge, now: int) -> None:
        """A locked edge was unlocked, and so used; the edges below it are unlocked already."""
        ...

    def split(self, upper: Edge, lower: Edge) -> None:
        """The first part of `lower` became the new edge `upper`."""
        ...

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return whether merging `lower`, the only child of `upper`, into `upper` leaves the order unchanged."""
        ...

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """`lower` was merged into `upper`."""
        ...

    def drop(self, edge: Edge) -> None:
        """An edge of the order was evicted."""
        ...

    def expose(self, edge: Edge) -> None:
        """The last page of an unlocked leaf is another one now: the leaf was trimmed, or lost its last child."""
        ...

    def first(self) -> Edge | None:
        """Return the unlocked leaf whose last page is evicted first."""
        ...

    def cut(self, edge: Edge) -> int:
        """Return the page down to which `edge`, returned by `first`, is evicted before other edges are."""
        ...

    def head(self) -> Any:
        """Return the rank of the last page of `first`, comparable between orders of the same policy."""
        ...

    def take_over(self, other: Any, edges: list[Edge]) -> None:
        """Move `edges`, all edges of one namespace, from `other`, an order of the same class, to this order."""
        ...

    def __iter__(self) -> Iterator[Edge]:
        """Iterate over its edges, or at least its leaves, in the order of eviction; costs n log n."""
        ...

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless the order is right for `edges`, all unlocked edges that belong to it."""
        ...
