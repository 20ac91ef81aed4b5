"""The order in which unlocked pages are given up, kept while the tree changes."""

from collections.abc import Iterator
from typing import Any, Protocol

from pagewood.radixcache.node import Edge


class Order(Protocol):
    """A total order over the unlocked leaves of one or more namespaces, told of every change by the tree.

    `now` is the tree's tick. A path is told from its deepest edge upwards. No method changes the tree.
    """

    def adopt(self, edge: Edge, now: int) -> None:
        """A new leaf, unlocked; `publish` of its path follows."""
        ...

    def publish(self, edge: Edge, now: int) -> None:
        """A sequence that ends with `edge` has been inserted, so its whole path has been used."""
        ...

    def touch(self, edge: Edge, now: int) -> None:
        """The path that ends with `edge` has been used, which matters to its unlocked part."""
        ...

    def hit(self, edge: Edge) -> None:
        """A match of the prefix that ends with `edge` has been locked."""
        ...

    def lock(self, edge: Edge) -> None:
        """An edge of the order has been locked."""
        ...

    def unlock(self, edge: Edge, now: int) -> None:
        """A locked edge is unlocked, and used; those below it are unlocked already."""
        ...

    def split(self, upper: Edge, lower: Edge) -> None:
        """`upper`, new, is what was the first part of `lower`."""
        ...

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return whether the order would be the same with `lower`, the only child of `upper`, a part of it."""
        ...

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """`lower` has become a part of `upper`."""
        ...

    def drop(self, edge: Edge) -> None:
        """An edge of the order has been evicted."""
        ...

    def expose(self, edge: Edge) -> None:
        """An unlocked leaf ends with another page than before: it was trimmed, or has lost its last child."""
        ...

    def first(self) -> Edge | None:
        """Return the unlocked leaf whose last page goes first."""
        ...

    def cut(self, edge: Edge) -> int:
        """Return how far `edge`, which `first` returned, goes before others do: down to this page."""
        ...

    def head(self) -> Any:
        """Return the rank of the last page of `first`, comparable with that of another order of the same policy."""
        ...

    def take_over(self, other: Any, edges: list[Edge]) -> None:
        """Let `edges`, all those of a namespace, leave `other`, an order of the same class, and enter this one."""
        ...

    def __iter__(self) -> Iterator[Edge]:
        """Go through its edges, or at least its leaves, what goes first first; at a cost of n log n."""
        ...

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless the order is right for `edges`, all the unlocked ones that belong in it."""
        ...
