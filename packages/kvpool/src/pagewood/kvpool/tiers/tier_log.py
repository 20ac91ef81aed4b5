"""The pages on the host and the disk, as changes that a reader outside of the process can follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Int32
from pagewood.kvpool.tiers.pages.keys import Namespace

Tier: TypeAlias = Literal["host", "disk"]


class Names(Protocol):
    """The names under which readers know pages, such as those of the device's cache; a `KeyChain` is one."""

    def root(self, namespace: Namespace) -> bytes:
        """Return the name that the first page of a sequence follows."""
        ...

    def extend(self, parent: bytes, tokens: Int32) -> list[bytes]:
        """Return the names of the whole pages of `tokens`, which follow the page named `parent`."""
        ...


class FollowedTier(Protocol):
    """A tier that reports which pages it has gained and lost: `HostTier` and `DiskTier`."""

    def track(self) -> deque[bytes]:
        """Return a queue to which the key of every page that is added or dropped is appended from now on."""
        ...

    def __contains__(self, key: bytes) -> bool:
        """Return whether it holds a page."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesStored:
    """A tier now holds consecutive pages of one sequence.

    Attributes:
        tier: The tier.
        namespace: Namespace of the sequence.
        parent: Name of the page before the first one, in any tier; None at the start of a sequence.
        names: Names of the pages, at least one.
        tokens: `[len(names) * page_size] int32`, tokens of the pages.
    """

    tier: Tier
    namespace: Namespace
    parent: bytes | None
    names: list[bytes]
    tokens: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesRemoved:
    """A tier no longer holds some pages; it may still hold pages that follow them.

    Attributes:
        tier: The tier.
        names: Names of the pages, at least one.
    """

    tier: Tier
    names: list[bytes]


@dataclass(slots=True, kw_only=True)
class _Page:
    """A page that is, or soon may be, in a tier."""

    namespace: Namespace
    parent: bytes | None
    name: bytes
    tokens: bytes
    is_on_device: bool = False  # written by: entered, left, follow
    tiers: list[Tier]  # tiers reported to the reader; written by: _compare, snapshot


class TierLog:
    """Follows the host and the disk of a `TieredIndex`; pass it to `TieredIndex.follow_tiers`.

    Invariant: a reader that has applied all changes up to the last `read` or `snapshot` knows which of the described
    pages each tier held then. A page is described when a request with its tokens is cached or recalled. So pages that
    an earlier process left on the disk are reported when they are first needed.

    Tiers know pages by keys only, so the log keeps the tokens of each page that the device or a tier holds, which takes
    about 300 bytes and 4 for each token. Read it regularly: reading forgets pages that are gone. It outlives an index,
    like the tiers. One thread uses it; tiers may report from others.

    Args:
        names: The readers' names of pages.
        page_size: Tokens per page.
    """

    __slots__ = ("_names", "_page_size", "_pages", "_tiers", "_touched")

    def __init__(self, names: Names, *, page_size: int) -> None:
        self._names = names
        self._page_size = page_size
        self._tiers: dict[Tier, tuple[FollowedTier, deque[bytes]]] = {}  # written by: follow
        self._pages: dict[bytes, _Page] = {}  # by key; written by: describe, _compare
        # Keys of pages that may have to be reported or forgotten, in order.
        self._touched: dict[bytes, None] = {}  # written by: describe, left, read, snapshot

    @property
    def num_pages(self) -> int:
        """Number of pages whose tokens it keeps."""
        return len(self._pages)

    def follow(self, *, host: FollowedTier, disk: FollowedTier | None) -> None:
        """Follow these tiers, of an index whose device is empty; a reader then needs a snapshot."""
        self._tiers = {"host": (host, host.track())}
        if disk is not None:
            self._tiers["disk"] = (disk, disk.track())
        for page in self._pages.values():
            page.is_on_device = False

    def describe(
        self, parent_key: bytes | None, keys: Sequence[bytes], tokens: Int32, namespace: Namespace = None
    ) -> None:
        """Learn the tokens of consecutive pages, so that they can be reported.

        Args:
            parent_key: Key of the page before them, which has been described; None at the start of a sequence.
            keys: Keys of the pages.
            tokens: `[>= len(keys) * page_size] int32`, their tokens.
            namespace: Namespace of the sequence.
        """
        parent = None if parent_key is None else self._pages[parent_key].name
        size = self._page_size
        for index, key in enumerate(keys):
            page = self._pages.get(key)
            if page is None:
                part = tokens[index * size : (index + 1) * size]
                [name] = self._names.extend(self._names.root(namespace) if parent is None else parent, part)
                page = _Page(namespace=namespace, parent=parent, name=name, tokens=part.tobytes(), tiers=[])
                self._pages[key] = page
                self._touched[key] = None
            parent = page.name

    def entered(self, keys: Iterable[bytes]) -> None:
        """Record that described pages are on the device; other keys are of states, which readers do not know."""
        for key in keys:
            if key in self._pages:
                self._pages[key].is_on_device = True

    def left(self, keys: Iterable[bytes]) -> None:
        """Record that pages are no longer on the device."""
        for key in keys:
            if key in self._pages:
                self._pages[key].is_on_device = False
                self._touched[key] = None

    def read(self) -> list[PagesStored | PagesRemoved]:
        """Return the changes since the last call."""
        for _, changed in self._tiers.values():
            while changed:
                self._touched[changed.popleft()] = None
        if not self._touched:
            return []
        keys = [key for key in self._touched if key in self._pages]
        self._touched.clear()
        changes = [change for tier in self._tiers for change in self._compare(tier, keys)]
        self._forget(keys)
        return changes

    def snapshot(self) -> list[PagesStored | PagesRemoved]:
        """Return all pages of the tiers, for a new reader; `read` continues from there."""
        for page in self._pages.values():
            page.tiers = []
        self._touched = dict.fromkeys(self._pages)
        return self.read()

    def _compare(self, tier: Tier, keys: Iterable[bytes]) -> Iterator[PagesStored | PagesRemoved]:
        """Yield the differences between a tier and the reader's state of these pages."""
        holder, _ = self._tiers[tier]
        removed: list[bytes] = []
        stored: list[_Page] = []
        for key in keys:
            page = self._pages[key]
            is_held, is_known = key in holder, tier in page.tiers
            if is_held and not is_known:
                page.tiers.append(tier)
                stored.append(page)
            elif is_known and not is_held:
                page.tiers.remove(tier)
                removed.append(page.name)
        if removed:
            yield PagesRemoved(tier=tier, names=removed)
        for run in _runs(stored):
            yield PagesStored(
                tier=tier,
                namespace=run[0].namespace,
                parent=run[0].parent,
                names=[page.name for page in run],
                tokens=np.frombuffer(b"".join(page.tokens for page in run), np.int32),
            )

    def _forget(self, keys: Iterable[bytes]) -> None:
        """Forget those of these pages that are in no tier."""
        for key in keys:
            page = self._pages[key]
            if not page.is_on_device and not page.tiers:
                del self._pages[key]


def _runs(pages: Iterable[_Page]) -> Iterator[list[_Page]]:
    """Yield the pages in runs in which each follows the one before it."""
    run: list[_Page] = []
    for page in pages:
        if run and page.parent != run[-1].name:
            yield run
            run = []
        run.append(page)
    if run:
        yield run
