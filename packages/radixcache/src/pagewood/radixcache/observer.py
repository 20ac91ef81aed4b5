"""How changes of the tree are reported, and how its content is read as a whole."""

from dataclasses import dataclass
from typing import Protocol

from pagewood.radixcache.arrays import Int32, from_bytes
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of whole pages in the tree: the pages of one `stored` call, or a part of them.

    Attributes:
        namespace: the namespace of the run.
        parent_page: id of the page before it; None at the start of a sequence.
        num_parent_pages: number of pages before it on its path.
        tokens: `[len(pages) * page_size] int32`, token ids, read-only.
        pages: `[> 0] int32`, page ids, read-only.
        num_leases: leases that end at its last page.
        is_locked: whether a lease ends at its last page or below it.
    """

    namespace: Namespace
    parent_page: int | None
    num_parent_pages: int
    tokens: Int32
    pages: Int32
    num_leases: int
    is_locked: bool


class Observer(Protocol):
    """Receives a notification for every page that enters or leaves the tree, in the order of the changes.

    A page is in the tree at most once, so its id identifies its position while it is cached. Edges are internal: a
    split is not reported. An observer must not change the cache and must not raise. Arrays are int32, one-dimensional
    and read-only, and may be kept.
    """

    def stored(self, namespace: Namespace, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        """The tree has adopted `pages` with their `tokens`; they follow `parent_page` (None: they start a sequence)."""
        ...

    def removed(self, namespace: Namespace, pages: Int32) -> None:
        """The tree has removed `pages`, consecutive pages of one path; all pages after them were removed before."""
        ...

    def cleared(self, namespace: Namespace) -> None:
        """`clear` has removed all unlocked pages of a namespace; `removed` was called for each of them before."""
        ...


class ObserverAdapter:
    """Passes the notifications of a tree on to an observer."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Report adopted pages."""
        self._observer.stored(space.name, parent_page, from_bytes([key]), from_bytes([values]))

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Report removed pages."""
        self._observer.removed(space.name, from_bytes([values]))

    def cleared(self, space: Space) -> None:
        """Report that a namespace was cleared."""
        self._observer.cleared(space.name)
