"""What the tree tells of itself while it changes, and how it is read as a whole."""

from dataclasses import dataclass
from typing import Protocol

from pagewood.radixcache.arrays import Int32, from_bytes
from pagewood.radixcache.node import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of whole pages in the tree: what one `stored` told, or a piece of it.

    Attributes:
        namespace: where it is cached.
        parent_page: the id of the page that it follows; None at the start of a sequence.
        num_parent_pages: pages before it on its path.
        tokens: `[len(pages) * page_size] int32`, token ids, read-only.
        pages: `[> 0] int32`, page ids, read-only.
        num_leases: leases that end at its last page.
        is_locked: a lease ends at its last page or below it.
    """

    namespace: str | None
    parent_page: int | None
    num_parent_pages: int
    tokens: Int32
    pages: Int32
    num_leases: int
    is_locked: bool


class Observer(Protocol):
    """Is told of every page that enters or leaves the tree, in the order in which it happens.

    A page is in the tree at most once, so its id names its place for as long as it is there; how the tree cuts its
    edges is nobody's business, and a split tells nothing. An observer must not change the cache, nor raise. Arrays are
    int32, one-dimensional, read-only, and may be kept.
    """

    def stored(self, namespace: str | None, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        """The tree adopted `pages` with their `tokens`, which follow `parent_page` (None: they start a sequence)."""
        ...

    def removed(self, namespace: str | None, pages: Int32) -> None:
        """The tree gave up `pages`, a stretch of one path in its order; whatever followed them has gone before."""
        ...

    def cleared(self, namespace: str | None) -> None:
        """All unlocked pages of a namespace have been given up by `clear`; `removed` has told of each before."""
        ...


class Teller:
    """Tells an observer what the tree tells its listeners."""

    __slots__ = ("_observer",)

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Pass on what was adopted."""
        self._observer.stored(space.name, parent_page, from_bytes([key]), from_bytes([values]))

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Pass on what was given up."""
        self._observer.removed(space.name, from_bytes([values]))

    def cleared(self, space: Space) -> None:
        """Pass on that a namespace was cleared."""
        self._observer.cleared(space.name)
