"""An order by the scores of a policy, kept in a heap that is repaired only when it is read."""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Self, cast

from pagewood.radixcache.node import Edge
from pagewood.radixcache.policies import Policy
from pagewood.radixcache.usage import Usage

_SPARE_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How the rank of a page is computed: whether it is watched, its priority, its score. The first two are optional.

    Attributes:
        policy: scores pages.
        page_size: tokens per page.
        clock: returns seconds; None if priorities do not count.
        watched_end: returns the end of the longest watched part of an edge; None if watches do not count.
    """

    policy: Policy
    page_size: int
    clock: Callable[[], float] | None = None
    watched_end: Callable[[Edge], int] | None = None


class Scored:
    """The unlocked leaves, by the rank of their last page.

    Invariant: every unlocked leaf has an entry that ranks no higher than the leaf does, or is in `_unranked`.
    `Usage.entry` is that entry; all other entries in the heap are void.

    So the top of the heap is the leaf to evict first, after void entries were removed and its rank was updated. Most
    uses raise ranks, which costs nothing here. An event that lowers a rank pushes a new entry: O(log n).

    A policy that raises, or returns NaN, must not stop the tree in the middle of a change. So only the methods by which
    pages are evicted raise; the others keep the exception, or the leaf without a rank, until `first` is called.
    """

    __slots__ = (
        "_counts_use", "_expiring", "_failure", "_full_at", "_heap", "_now_s", "_num_pushed", "_scoring", "_unranked",
    )  # fmt: skip

    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._counts_use = type(scoring.policy).used is not Policy.used
        self._heap: list[tuple[Any, int, Edge]] = []  # written by: _push, first
        self._expiring: list[tuple[float, int, Edge]] = []  # written by: _await_deadlines, _expire
        self._unranked: list[Edge] = []  # leaves that the policy could not score; written by: expose, first
        self._failure: Exception | None = None  # what `Policy.used` has raised; written by: _notify, first
        self._num_pushed = 0  # written by: _push, _await_deadlines
        self._full_at = _SPARE_ENTRIES  # written by: _push; above this size, void entries are removed
        self._now_s = -float("inf")  # written by: _expire

    def __iter__(self) -> Iterator[Edge]:
        """Iterate over the unlocked leaves by rank."""
        self._expire()
        leaves = [edge for _, _, edge in self._heap if edge.is_free_leaf and usage_of(edge).entry is not None]
        return iter(sorted(dict.fromkeys(leaves), key=lambda edge: self._rank(edge, edge.end)))

    def adopt(self, edge: Edge, now: int) -> None:
        """Create the usage of a new leaf."""
        edge.usage = Usage(created=now, last_used=now)

    def publish(self, edge: Edge, now: int) -> None:
        """Record the length of the sequence, and the use, along its path."""
        num_tokens = edge.end * self._scoring.page_size
        step = edge
        while step.parent is not None:
            usage = usage_of(step)
            usage.num_sequence_tokens = num_tokens
            self._use(usage, now)
            step = step.parent
        self.expose(edge)

    def touch(self, edge: Edge, now: int) -> None:
        """Record the use along the unlocked part of the path."""
        step = edge
        while not step.num_pins and step.parent is not None:
            self._use(usage_of(step), now)
            step = step.parent
        self.expose(edge)

    def hit(self, edge: Edge) -> None:
        """Count a use along the whole path."""
        while edge.parent is not None:
            usage = usage_of(edge)
            usage.num_uses += 1
            self._notify(usage)
            edge = edge.parent

    def lock(self, edge: Edge) -> None:
        """Do nothing: `first` skips locked edges."""

    def unlock(self, edge: Edge, now: int) -> None:
        """Record the use."""
        self._use(usage_of(edge), now)
        self.expose(edge)

    def split(self, upper: Edge, lower: Edge) -> None:
        """Copy the usage to the upper part."""
        usage = copy(usage_of(lower))
        usage.entry = None
        upper.usage = usage
        self._await_deadlines(upper)

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return False: the usages differ."""
        return False

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """Never called, because `can_absorb` returns False."""
        raise AssertionError("edges with usages must not be absorbed")

    def drop(self, edge: Edge) -> None:
        """Invalidate the entry of the edge."""
        usage_of(edge).entry = None

    def expose(self, edge: Edge) -> None:
        """Ensure that an unlocked leaf has an entry that ranks no higher than it does."""
        if edge.is_free_leaf:
            entry: Any = usage_of(edge).entry
            try:
                rank = self._rank(edge, edge.end)
                if entry is None or rank < entry[0]:
                    self._push(edge, rank)
            except Exception:  # `first` tries again, and raises
                usage_of(edge).entry = None
                self._unranked.append(edge)

    def first(self) -> Edge | None:
        """Return the unlocked leaf whose last page has the lowest rank.

        Raises:
            Exception: what the policy raises, or has raised since the last call.
        """
        self._expire()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        while self._unranked:
            edge = self._unranked[-1]
            if edge.is_free_leaf and usage_of(edge).entry is None:
                self._push(edge, self._rank(edge, edge.end))
            self._unranked.pop()
        heap = self._heap
        while heap:
            entry = heap[0]
            rank, number, edge = entry
            usage = usage_of(edge)
            if usage.entry is not entry:
                heappop(heap)
            elif not edge.is_free_leaf:
                usage.entry = None
                heappop(heap)
            elif (risen := self._rank(edge, edge.end)) > rank:
                usage.entry = entry = (risen, number, edge)
                heapreplace(heap, entry)
            else:
                return edge
        return None

    def cut(self, edge: Edge) -> int:
        """Return the page down to which ranks do not exceed that of the last page, and report its score as evicted."""
        rank = self._heap[0][0]
        self._scoring.policy.evicted(self._scoring.policy.score(usage_of(edge), edge.end * self._scoring.page_size))
        kept, given = edge.start, edge.end  # prefix ends: `given` ranks no higher, `kept` is not known yet
        if not self._rank(edge, edge.start + 1) > rank:
            return edge.start
        kept += 1
        while given - kept > 1:
            middle = (kept + given) // 2
            if self._rank(edge, middle) > rank:
                kept = middle
            else:
                given = middle
        return kept

    def head(self) -> Any:
        """Return the rank of the leaf that `first` returned."""
        return self._heap[0][0]

    @property
    def keeps_priorities(self) -> bool:
        """Whether priorities count."""
        return self._scoring.clock is not None

    def retain(self, edge: Edge, priority: int, until: float) -> None:
        """Set the priority of an edge, and its deadline."""
        usage_of(edge).retain(priority, until)
        self._await_deadlines(edge)
        self.expose(edge)

    def take_over(self, other: Self, edges: list[Edge]) -> None:
        """Enter the unlocked leaves in this order, and invalidate their entries in the other one."""
        for edge in edges:
            usage = usage_of(edge)
            usage.entry = None
            self.expose(edge)
            self._await_deadlines(edge)

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless every unlocked leaf has an entry that ranks no higher than it does."""
        self._expire()
        entries = {id(entry) for entry in self._heap}
        for edge in edges:
            if edge.is_free_leaf and edge not in self._unranked:
                entry: Any = usage_of(edge).entry
                if id(entry) not in entries or entry[2] is not edge:
                    raise AssertionError(f"an unlocked leaf must have an entry: {edge!r}")
                if entry[0] > self._rank(edge, edge.end):
                    raise AssertionError(f"an entry must rank no higher than its leaf: {edge!r}")

    def _use(self, usage: Usage, now: int) -> None:
        usage.last_used = now
        self._notify(usage)

    def _notify(self, usage: Usage) -> None:
        """Notify the policy of a use."""
        if self._counts_use:
            try:
                self._scoring.policy.used(usage)
            except Exception as error:  # raised by `first`
                self._failure = error

    def _rank(self, edge: Edge, end: int) -> Any:
        """Return the rank of the page that ends at `end`."""
        scoring, usage = self._scoring, usage_of(edge)
        score = scoring.policy.score(usage, end * scoring.page_size)
        if _is_nan(score):
            raise ValueError(f"score must not be NaN, got {score!r} from {type(scoring.policy).__name__}")
        if scoring.clock is None and scoring.watched_end is None:
            return score
        is_watched = scoring.watched_end is not None and end <= scoring.watched_end(edge)
        priority = usage.priority_at(self._now_s) if scoring.clock is not None else 0
        return is_watched, priority, score

    def _push(self, edge: Edge, rank: Any) -> None:
        heap = self._heap
        self._num_pushed += 1
        entry = (rank, self._num_pushed, edge)
        usage_of(edge).entry = entry
        heappush(heap, entry)
        if len(heap) > self._full_at:
            heap[:] = [entry for entry in heap if usage_of(entry[2]).entry is entry]
            heapify(heap)
            self._full_at = 2 * len(heap) + _SPARE_ENTRIES

    def _await_deadlines(self, edge: Edge) -> None:
        for _, until in usage_of(edge).priorities:
            if until < float("inf"):
                self._num_pushed += 1
                heappush(self._expiring, (until, self._num_pushed, edge))

    def _expire(self) -> None:
        """Update the entries of edges whose deadlines have passed."""
        if self._scoring.clock is None:
            return
        self._now_s = self._scoring.clock()
        while self._expiring and self._expiring[0][0] <= self._now_s:
            edge = heappop(self._expiring)[2]
            if edge.space.order is self:  # it may belong to another order by now
                self.expose(edge)


def usage_of(edge: Edge) -> Usage:
    """Return the usage of an edge that is in a scored order."""
    assert edge.usage is not None  # set by `adopt` and `split`
    return edge.usage


def _is_nan(score: Any) -> bool:
    """Return whether a score, or a part of it, is NaN, which cannot be ordered."""
    return any(map(_is_nan, cast("tuple[Any, ...]", score))) if type(score) is tuple else score != score
