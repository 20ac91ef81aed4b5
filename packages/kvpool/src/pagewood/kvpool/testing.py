"""A brute-force oracle for page allocators, and conformance tests for any allocator; needs hypothesis.

An allocator of your own conforms if this test passes:

    TestMyAllocator = allocator_conformance(MyAllocator).TestCase

For an allocator that can also reserve, resize and move, use `elastic_allocator_conformance(MyAllocator).TestCase`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from pagewood.kvpool.allocator import Moves, OutOfPages


class Allocator(Protocol):
    """The methods of a page allocator; `PageAllocator` documents each of them."""

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        ...

    @property
    def num_free(self) -> int:
        """Number of pages that can be handed out now."""
        ...

    def alloc(self, n: int) -> NDArray[np.int32]:
        """Hand out `n` pages, or raise OutOfPages."""
        ...

    def free(self, pages: NDArray[np.int32]) -> None:
        """Take pages back, or raise ValueError."""
        ...

    def batched_frees(self) -> AbstractContextManager[None]:
        """Make pages that are freed inside the block available only when it ends."""
        ...


class ElasticAllocator(Allocator, Protocol):
    """An allocator whose pool can change; `PageAllocator` documents each method."""

    @property
    def num_reserved(self) -> int:
        """Number of free pages that are not handed out."""
        ...

    def reserve(self, n: int) -> None:
        """Set `n` free pages aside, or raise OutOfPages."""
        ...

    def unreserve(self, n: int) -> None:
        """Make `n` reserved pages available again, or raise ValueError."""
        ...

    def held_pages(self) -> NDArray[np.int32]:
        """Return the ids of all held pages, ascending."""
        ...

    def resize(self, num_pages: int) -> None:
        """Change the number of pages, or raise ValueError."""
        ...

    def plan_moves(self, num_pages: int | None = None) -> Moves:
        """Plan the moves that bring all held pages below `num_pages`, or raise ValueError."""
        ...

    def move(self, moves: Moves) -> None:
        """Record that pages have moved, or raise ValueError."""
        ...


class AllocatorOracle:
    """Records which pages are free, held or parked (freed in an open batch), from the calls of an allocator.

    It does not choose pages: an allocator may hand out free pages in any order.

    Attributes:
        num_pages: Number of pages.
        num_reserved: Number of reserved pages.
        free: Ids of free pages.
        held: Ids of held pages.
        parked: Ids of pages freed in an open batch.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # written by: on_resize
        self.num_reserved = 0  # written by: on_reserve
        self.free = set(range(num_pages))  # written by: on_alloc, on_free, end_batch, on_resize, on_move
        self.held: set[int] = set()  # written by: on_alloc, on_free, on_move
        self.parked: set[int] = set()  # written by: on_free, end_batch

    @property
    def num_free(self) -> int:
        """Number of pages that can be handed out."""
        return len(self.free) - self.num_reserved

    def on_alloc(self, n: int, pages: NDArray[np.int32]) -> None:
        """Record pages that were handed out, `[n] int32`; fail unless they are `n` distinct free pages."""
        assert pages.dtype == np.int32, f"pages must be int32, got {pages.dtype}"
        assert pages.shape == (n,), f"alloc({n}) must return {n} pages in one dimension, got shape {pages.shape}"
        ids = set(pages.tolist())
        assert len(ids) == n, f"pages must be distinct, got {pages}"
        assert ids <= self.free, f"pages must be free, got {ids - self.free}"
        self.free -= ids
        self.held |= ids

    def on_free(self, pages: set[int], *, is_batched: bool) -> None:
        """Record that held pages were freed."""
        assert pages <= self.held, f"pages must be held, got {pages - self.held}"
        self.held -= pages
        (self.parked if is_batched else self.free).update(pages)

    def end_batch(self) -> None:
        """Record that the pages freed in a batch are free now."""
        self.free |= self.parked
        self.parked.clear()

    def on_reserve(self, n: int) -> None:
        """Record that `n` pages were reserved, or unreserved if `n` is negative."""
        self.num_reserved += n

    def can_resize(self, num_pages: int) -> bool:
        """Return whether a pool of `num_pages` pages has room for all held, parked and reserved pages."""
        num_added = max(num_pages - self.num_pages, 0)
        num_kept = sum(page < num_pages for page in self.free)
        is_tail_free = all(page < num_pages for page in self.held | self.parked)
        return num_pages >= 1 and is_tail_free and num_kept + num_added >= self.num_reserved

    def on_resize(self, num_pages: int) -> None:
        """Record a change of size that `can_resize` allows."""
        self.free = {page for page in self.free if page < num_pages} | set(range(self.num_pages, num_pages))
        self.num_pages = num_pages

    def on_move(self, src: list[int], dst: list[int]) -> None:
        """Record that each page of `dst` is held instead of its `src`."""
        assert self.held.issuperset(src), f"sources must be held, got {set(src) - self.held}"
        assert self.free.issuperset(dst), f"destinations must be free, got {set(dst) - self.free}"
        self.held = (self.held - set(src)) | set(dst)
        self.free = (self.free - set(dst)) | set(src)


class AllocatorMachine(RuleBasedStateMachine):
    """Makes the same random calls to an allocator and to the oracle; made by `allocator_conformance`."""

    make_allocator: Callable[[int], Any]
    allocator: Any  # an Allocator; an ElasticAllocator in ElasticAllocatorMachine

    @initialize(num_pages=st.integers(1, 40))
    def make(self, num_pages: int) -> None:
        """Start with a pool of any small size."""
        self.allocator = self.make_allocator(num_pages)
        self.oracle = AllocatorOracle(num_pages)
        self.batches: list[AbstractContextManager[None]] = []
        self.kept: list[tuple[NDArray[np.int32], list[int]]] = []

    @rule(n=st.integers(0, 6) | st.integers(0, 42), is_kept=st.booleans())
    def alloc(self, n: int, is_kept: bool) -> None:
        """Request up to more pages than exist. The returned array belongs to the caller, to keep or to write to."""
        available = self.oracle.num_free
        refusal: OutOfPages | None = None
        try:
            pages = self.allocator.alloc(n)
        except OutOfPages as error:
            refusal = error
        else:
            self.oracle.on_alloc(n, pages)
            if is_kept:
                self.kept.append((pages, pages.tolist()))
            else:
                pages.fill(-1)
        if refusal is not None:
            assert n > available, f"alloc({n}) must succeed with {available} pages free"
            assert (refusal.requested, refusal.available) == (n, available)

    @rule(n=st.integers(-3, -1))
    def alloc_negative(self, n: int) -> None:
        """Request a negative number of pages."""
        try:
            self.allocator.alloc(n)
        except ValueError:
            return
        raise AssertionError(f"alloc({n}) must raise ValueError")

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Free some held pages, in any order."""
        pages = self._draw_held(data)
        array = np.array(pages, dtype=np.int32)
        self.allocator.free(array)
        self.oracle.on_free(set(pages), is_batched=bool(self.batches))
        array.fill(-1)  # the array stays the caller's

    @rule(data=st.data())
    def free_twice(self, data: st.DataObject) -> None:
        """Free held pages and one page that is not held."""
        not_held = sorted(self.oracle.free | self.oracle.parked)
        if not_held:
            self._free_with_wrong(data, data.draw(st.sampled_from(not_held), label="free page"))

    @rule(data=st.data(), is_negative=st.booleans())
    def free_foreign(self, data: st.DataObject, is_negative: bool) -> None:
        """Free held pages and one page that does not exist."""
        ids = st.integers(-(2**31), -1) if is_negative else st.integers(self.oracle.num_pages, 2**31 - 1)
        self._free_with_wrong(data, data.draw(ids | st.sampled_from([-1, self.oracle.num_pages]), label="foreign page"))

    @precondition(lambda self: self.oracle.held)
    @rule(data=st.data())
    def free_duplicate(self, data: st.DataObject) -> None:
        """Free a held page more than once in one call, even more often than there are pages."""
        page = data.draw(st.sampled_from(sorted(self.oracle.held)), label="page")
        others = [other for other in self._draw_held(data) if other != page]
        times = data.draw(st.integers(2, 50), label="times")
        self._free_refused(data.draw(st.permutations([page] * times + others)), wrong=page)

    @precondition(lambda self: len(self.batches) < 3)
    @rule()
    def begin_batch(self) -> None:
        """Open a block of batched frees, perhaps inside another block."""
        batch = self.allocator.batched_frees()
        batch.__enter__()
        self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule()
    def end_batch(self) -> None:
        """Close the innermost block; the pages freed in it stay freed."""
        self.batches.pop().__exit__(None, None, None)
        if not self.batches:
            parked = self.oracle.parked.copy()
            self.oracle.end_batch()
            self._each_refused(parked)

    @invariant()
    def counts_agree(self) -> None:
        """Check that both sides have the same numbers of pages and of free pages."""
        assert self.allocator.num_pages == self.oracle.num_pages
        assert self.allocator.num_free == self.oracle.num_free

    @invariant()
    def arrays_stay_the_callers(self) -> None:
        """Check that arrays of pages that were returned have not changed."""
        for pages, ids in self.kept:
            assert pages.tolist() == ids

    def teardown(self) -> None:
        """Close the open blocks and free everything; check that all pages are free again."""
        if not hasattr(self, "oracle"):
            return  # the run failed in `make`
        self.before_teardown()
        while self.batches:
            self.end_batch()
        held = sorted(self.oracle.held)
        self.allocator.free(np.array(held, dtype=np.int32))
        self.oracle.on_free(set(held), is_batched=False)
        self.alloc(self.oracle.num_pages, is_kept=False)

    def before_teardown(self) -> None:
        """Release whatever would keep some pages from being handed out."""

    def _draw_held(self, data: st.DataObject) -> list[int]:
        held = sorted(self.oracle.held)
        return data.draw(st.lists(st.sampled_from(held), unique=True) if held else st.just([]), label="held pages")

    def _free_with_wrong(self, data: st.DataObject, wrong: int) -> None:
        self._free_refused(data.draw(st.permutations([wrong, *self._draw_held(data)])), wrong=wrong)

    def _each_refused(self, pages: Iterable[int]) -> None:
        """Check that the allocator treats each of these pages as free: it refuses to free it."""
        for page in pages:
            self._free_refused([page], wrong=page)

    def _free_refused(self, pages: list[int], *, wrong: int) -> None:
        message: str | None = None
        try:
            self.allocator.free(np.array(pages, dtype=np.int32))
        except ValueError as error:
            message = str(error)
        assert message is not None, f"free({pages}) must raise ValueError for page {wrong}"
        assert str(wrong) in message, f"the error must name page {wrong}, got {message}"


class ElasticAllocatorMachine(AllocatorMachine):
    """Tests an elastic allocator in the same way; made by `elastic_allocator_conformance`."""

    @rule(n=st.integers(-1, 3) | st.integers(0, 42))
    def reserve(self, n: int) -> None:
        """Reserve up to more pages than are free."""
        available = self.oracle.num_free
        refusal: OutOfPages | ValueError | None = None
        try:
            self.allocator.reserve(n)
        except (OutOfPages, ValueError) as error:
            refusal = error
        match refusal:
            case None:
                assert 0 <= n <= available, f"reserve({n}) must fail with {available} pages free"
                self.oracle.on_reserve(n)
            case OutOfPages():
                assert n > available, f"reserve({n}) must succeed with {available} pages free"
                assert (refusal.requested, refusal.available) == (n, available)
            case ValueError():
                assert n < 0, f"reserve({n}) must succeed"

    @rule(n=st.integers(-2, 42))
    def unreserve(self, n: int) -> None:
        """Unreserve some of the reserved pages, or too many."""
        is_right = 0 <= n <= self.oracle.num_reserved
        assert is_right == accepts(lambda: self.allocator.unreserve(n)), f"unreserve({n}) of {self.oracle.num_reserved}"
        if is_right:
            self.oracle.on_reserve(-n)

    @rule(num_pages=st.integers(0, 60))
    def resize(self, num_pages: int) -> None:
        """Grow the pool, shrink it, or try to cut off pages that are not free."""
        is_right = self.oracle.can_resize(num_pages)
        assert is_right == accepts(lambda: self.allocator.resize(num_pages)), f"resize({num_pages})"
        if is_right:
            self.oracle.on_resize(num_pages)
            self._each_refused(self.oracle.free | self.oracle.parked)

    @rule(data=st.data(), is_targeted=st.booleans())
    def move(self, data: st.DataObject, is_targeted: bool) -> None:
        """Plan moves, check that the plan is the smallest possible, and carry out any part of it."""
        oracle = self.oracle
        end = len(oracle.held) + len(oracle.parked)
        target = data.draw(st.integers(0, oracle.num_pages), label="num_pages") if is_targeted else None
        end = end if target is None else target
        src = sorted(page for page in oracle.held if page >= end)
        dst = sorted(page for page in oracle.free if page < end)[: len(src)]
        try:
            moves: Moves = self.allocator.plan_moves(target)
        except ValueError:
            assert len(dst) < len(src), f"plan_moves({target}) must succeed"
            return
        assert len(dst) == len(src), f"plan_moves({target}) must fail"
        assert moves.src.dtype == moves.dst.dtype == np.int32
        assert moves.src.tolist() == src
        assert sorted(moves.dst.tolist()) == dst
        chosen = data.draw(st.lists(st.sampled_from(range(len(src))), unique=True) if src else st.just([]))
        part = Moves(src=moves.src[chosen], dst=moves.dst[chosen])
        self.allocator.move(part)
        oracle.on_move(part.src.tolist(), part.dst.tolist())
        self._each_refused(part.src.tolist())

    @rule(data=st.data())
    def move_anything(self, data: st.DataObject) -> None:
        """Move from and to any pages, most of them wrong."""
        ids = st.lists(st.integers(-1, self.oracle.num_pages), max_size=3)
        src, dst = data.draw(ids, label="src"), data.draw(ids, label="dst")
        is_distinct = len(src) == len(dst) and len({*src, *dst}) == 2 * len(src)
        is_right = is_distinct and self.oracle.held.issuperset(src) and self.oracle.free.issuperset(dst)
        moves = Moves(src=np.array(src, dtype=np.int32), dst=np.array(dst, dtype=np.int32))
        assert is_right == accepts(lambda: self.allocator.move(moves)), f"move({src}, {dst})"
        if is_right:
            self.oracle.on_move(src, dst)

    @invariant()
    def held_pages_agree(self) -> None:
        """Check that both sides have the same held pages and the same number of reserved pages."""
        assert self.allocator.held_pages().tolist() == sorted(self.oracle.held)
        assert self.allocator.num_reserved == self.oracle.num_reserved

    def before_teardown(self) -> None:
        """Unreserve all pages."""
        self.unreserve(self.oracle.num_reserved)


def accepts(call: Callable[[], None]) -> bool:
    """Make a call; return whether it raised no ValueError."""
    try:
        call()
    except ValueError:
        return False
    return True


def allocator_conformance(make_allocator: Callable[[int], Allocator]) -> type[AllocatorMachine]:
    """Return a hypothesis state machine that tests the allocators made by `make_allocator(num_pages)`.

    Its `TestCase` attribute is a test class for pytest or unittest.
    """
    members = {"make_allocator": staticmethod(make_allocator)}
    return type("Conformance", (AllocatorMachine,), members)


def elastic_allocator_conformance(
    make_allocator: Callable[[int], ElasticAllocator],
) -> type[ElasticAllocatorMachine]:
    """Return the same for allocators that can also reserve, resize and move; see `allocator_conformance`."""
    members = {"make_allocator": staticmethod(make_allocator)}
    return type("ElasticConformance", (ElasticAllocatorMachine,), members)
