import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.kvpool import Moves, OutOfPages, PageAllocator
from pagewood.kvpool.testing import elastic_allocator_conformance

Conformance = elastic_allocator_conformance(PageAllocator)
Conformance.TestCase.settings = settings(max_examples=50, deadline=None)
TestConformance = Conformance.TestCase


class ByArrays(PageAllocator):
    """Takes the way of many pages for few pages too."""

    def _free_few(self, pages: list[int]) -> bool:
        return False


ConformanceByArrays = elastic_allocator_conformance(ByArrays)
ConformanceByArrays.TestCase.settings = settings(max_examples=25, deadline=None)
TestConformanceByArrays = ConformanceByArrays.TestCase


def pages(*ids: int) -> NDArray[np.int32]:
    return np.array(ids, dtype=np.int32)


def test_the_first_pages_are_handed_out_in_ascending_order():
    assert PageAllocator(10).alloc(4).tolist() == [0, 1, 2, 3]


def test_pages_freed_last_are_handed_out_first_in_the_order_of_the_free():
    allocator = PageAllocator(6)
    allocator.alloc(6)
    allocator.free(pages(1, 2))
    allocator.free(pages(5, 3))
    assert allocator.alloc(4).tolist() == [5, 3, 1, 2]


def test_out_of_pages_has_both_numbers_and_allocates_nothing():
    allocator = PageAllocator(4)
    allocator.alloc(1)
    with pytest.raises(OutOfPages, match="requested 4 pages, 3 are free") as caught:
        allocator.alloc(4)
    assert (caught.value.requested, caught.value.available) == (4, 3)
    assert allocator.num_free == 3
    assert allocator.held_pages().tolist() == [0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (pages(0, 1, 4), "pages must be held, got page 4, which is free"),
        (pages(0, 9), "pages must be in [0, 8), got page 9"),
        (pages(-1, 2), "pages must be in [0, 8), got page -1"),
        (pages(2, 0, 2), "pages must be distinct, got page 2 twice"),
    ],
)
def test_a_wrong_free_names_the_page_and_frees_nothing(wrong: NDArray[np.int32], message: str):
    allocator = PageAllocator(8)
    allocator.alloc(4)
    with pytest.raises(ValueError, match=re.escape(message)):
        allocator.free(wrong)
    assert allocator.held_pages().tolist() == [0, 1, 2, 3]
    assert allocator.num_free == 4


@pytest.mark.parametrize("wrong", [np.array([0]), np.zeros((1, 1), dtype=np.int32), np.array([0.0], dtype=np.float32)])
def test_only_one_dimensional_int32_arrays_are_freed(wrong: NDArray[np.int32]):
    allocator = PageAllocator(2)
    allocator.alloc(1)
    with pytest.raises(ValueError, match="pages must be a one-dimensional int32 array"):
        allocator.free(wrong)
    assert allocator.num_free == 1


@pytest.mark.parametrize("num_pages", [-1, 0, 2**31])
def test_num_pages_is_checked(num_pages: int):
    with pytest.raises(ValueError, match=f"num_pages must be in .*got {num_pages}"):
        PageAllocator(num_pages)


def test_a_free_with_more_duplicates_than_pages_changes_nothing():
    allocator = PageAllocator(2)
    held = allocator.alloc(2)
    with pytest.raises(ValueError, match="pages must be distinct, got page 0 twice"):
        allocator.free(pages(0, 0, 1, 1, 1, 1))
    allocator.free(held)
    assert allocator.num_free == 2


def test_pages_freed_in_a_batch_are_free_when_it_ends():
    allocator = PageAllocator(4)
    held = allocator.alloc(4)
    with allocator.batched_frees():
        allocator.free(held[:2])
        assert allocator.num_free == 0
        assert allocator.held_pages().tolist() == [2, 3]
        with pytest.raises(ValueError, match="got page 1, which is free"):
            allocator.free(held[1:])
    assert allocator.num_free == 2
    with pytest.raises(ValueError, match="got page 1, which is free"):
        allocator.free(held[1:])


def fail_in_a_batch(allocator: PageAllocator, held: NDArray[np.int32]) -> None:
    with allocator.batched_frees():
        allocator.free(held)
        raise KeyError


def test_pages_freed_in_a_batch_are_free_when_it_raises():
    allocator = PageAllocator(4)
    with pytest.raises(KeyError):
        fail_in_a_batch(allocator, allocator.alloc(4))
    assert allocator.num_free == 4


def test_pages_freed_in_an_inner_batch_are_free_when_the_outer_one_ends():
    allocator = PageAllocator(4)
    held = allocator.alloc(4)
    with allocator.batched_frees():
        with allocator.batched_frees():
            allocator.free(held)
        assert allocator.num_free == 0
    assert allocator.num_free == 4


@given(st.lists(st.integers(0, 19), unique=True))
def test_held_pages_are_the_pages_allocated_and_not_freed(freed: list[int]):
    allocator = PageAllocator(20)
    allocator.alloc(20)
    allocator.free(pages(*freed))
    held = allocator.held_pages()
    assert held.dtype == np.int32
    assert held.tolist() == sorted(set(range(20)) - set(freed))


def test_a_strided_array_of_pages_is_freed():
    allocator = PageAllocator(8)
    allocator.free(allocator.alloc(8)[::-3])
    assert allocator.held_pages().tolist() == [0, 2, 3, 5, 6]


def test_a_run_of_pages_is_handed_out_as_a_run_again():
    allocator = PageAllocator(1000)
    allocator.alloc(10)
    run = allocator.alloc(63)
    allocator.alloc(100)
    allocator.free(run)
    assert allocator.alloc(63).tolist() == list(range(10, 73))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (pages(0, 1, 1, 3), "pages must be distinct, got page 1 twice"),
        (pages(1, 3, 0, 4), "pages must be held, got page 4, which is free"),
        (pages(2, 3, 4), "pages must be held, got page 4, which is free"),
        (pages(7, 8), "pages must be in [0, 8), got page 8"),
        (pages(-1, 0, 1), "pages must be in [0, 8), got page -1"),
        (pages(5, 6), "pages must be held, got page 5, which is free"),
    ],
)
def test_a_wrong_free_of_almost_consecutive_pages_frees_nothing(wrong: NDArray[np.int32], message: str):
    allocator = ByArrays(8)
    allocator.alloc(8)
    allocator.free(pages(4))
    with allocator.batched_frees():
        allocator.free(pages(5, 6))
        with pytest.raises(ValueError, match=re.escape(message)):
            allocator.free(wrong)
        assert allocator.held_pages().tolist() == [0, 1, 2, 3, 7]
    allocator.free(pages(0, 1, 2, 3))
    assert allocator.alloc(7).tolist() == [0, 1, 2, 3, 5, 6, 4]


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_thousands_of_pages_in_a_few_runs(data: st.DataObject):
    allocator, num_pages = PageAllocator(20_000), 20_000
    free = list(range(num_pages))  # as a stack whose top is at the front
    held: list[list[int]] = []  # runs, as they were allocated or cut
    for _ in range(data.draw(st.integers(1, 8))):
        number = data.draw(st.sampled_from([1, 30, 4500, 6000]))
        if number <= len(free):
            held.append(free[:number])
            del free[:number]
            assert allocator.alloc(number).tolist() == held[-1]
        cuts = [run for run in held if len(run) > 1]
        if cuts:
            run = data.draw(st.sampled_from(cuts))
            at = data.draw(st.integers(1, len(run) - 1))
            held.remove(run)
            held += [run[:at], run[at:]]
        freed = data.draw(st.lists(st.sampled_from(held), max_size=4, unique_by=id)) if held else []
        ids = [page for run in freed for page in run]
        is_parked = data.draw(st.booleans())
        spoiled = data.draw(st.sampled_from(["no", "twice", "free", "beyond", "negative"]))
        wrong = {"twice": ids[-1:], "free": free[:1], "beyond": [num_pages], "negative": [-1]}.get(spoiled)
        if wrong and ids:
            at = data.draw(st.sampled_from([0, len(freed[0]), len(ids)]))
            with pytest.raises(ValueError, match="pages must be"):
                allocator.free(np.array(ids[:at] + wrong + ids[at:], np.int32))
        if is_parked:
            with allocator.batched_frees():
                allocator.free(np.array(ids, np.int32))
                with pytest.raises(ValueError, match="pages must be held") if ids else nullcontext():
                    allocator.free(np.array(ids, np.int32))
        else:
            allocator.free(np.array(ids, np.int32))
        free = ids + free
        held = [run for run in held if not any(run is one for one in freed)]
        assert allocator.held_pages().tolist() == sorted(page for run in held for page in run)
    assert allocator.alloc(len(free)).tolist() == free


def test_pages_are_written_to_the_callers_array():
    row = np.full(5, -1, dtype=np.int32)
    allocator = PageAllocator(4)
    pages = allocator.alloc(3, out=row[1:4])
    assert row.tolist() == [-1, 0, 1, 2, -1]
    assert pages.base is row
    for wrong in (np.zeros(2, dtype=np.int32), np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int32)):
        with pytest.raises(ValueError, match=r"out must be int32 of shape \(1,\), got"):
            allocator.alloc(1, out=wrong)  # pyright: ignore[reportArgumentType]
    assert allocator.num_free == 1


def test_reserved_pages_are_not_handed_out():
    allocator = PageAllocator(8)
    allocator.reserve(5)
    assert (allocator.num_free, allocator.num_reserved) == (3, 5)
    with pytest.raises(OutOfPages, match="requested 4 pages, 3 are free"):
        allocator.alloc(4)
    with pytest.raises(OutOfPages, match="requested 4 pages, 3 are free"):
        allocator.reserve(4)
    with pytest.raises(ValueError, match=re.escape("n must be in [0, num_reserved = 5], got 6")):
        allocator.unreserve(6)
    allocator.unreserve(1)
    assert len(allocator.alloc(4)) == 4


def test_new_pages_are_handed_out_after_the_free_ones():
    allocator = PageAllocator(3)
    held = allocator.alloc(2)
    allocator.resize(5)
    assert allocator.num_pages == 5
    allocator.free(held)
    assert allocator.alloc(5).tolist() == [0, 1, 2, 3, 4]


def test_a_pool_shrinks_when_its_tail_is_free():
    allocator = PageAllocator(6)
    held = allocator.alloc(4)
    with pytest.raises(ValueError, match="num_pages must cut off only free pages, got 2 with 2 pages not free"):
        allocator.resize(2)
    assert allocator.num_pages == 6
    allocator.free(held[2:])
    allocator.reserve(1)
    with pytest.raises(ValueError, match="num_pages must leave 1 free pages for reservations, got 2"):
        allocator.resize(2)
    allocator.resize(3)
    allocator.unreserve(1)
    assert allocator.alloc(1).tolist() == [2]
    with pytest.raises(ValueError, match=r"num_pages must be in .*, got 0"):
        allocator.resize(0)


def test_a_pool_can_be_resized_inside_a_batch():
    allocator = PageAllocator(3)
    allocator.alloc(3)
    with allocator.batched_frees():
        allocator.free(pages(2, 1))
        allocator.resize(5)
        with pytest.raises(ValueError, match="num_pages must cut off only free pages"):
            allocator.resize(2)
        for page in (1, 2):
            with pytest.raises(ValueError, match=f"got page {page}, which is free"):
                allocator.free(pages(page))
        assert allocator.held_pages().tolist() == [0]
        assert allocator.num_free == 2
    assert sorted(allocator.alloc(4).tolist()) == [1, 2, 3, 4]


def test_moves_gather_the_held_pages_at_the_front():
    allocator = PageAllocator(10)
    allocator.alloc(10)
    allocator.free(pages(0, 2, 3, 5, 6, 8))  # held: 1, 4, 7, 9
    moves = allocator.plan_moves()
    assert (moves.src.tolist(), moves.dst.tolist()) == ([4, 7, 9], [0, 2, 3])
    assert allocator.held_pages().tolist() == [1, 4, 7, 9]
    allocator.move(moves)
    assert allocator.held_pages().tolist() == [0, 1, 2, 3]
    for page in (4, 7, 9):
        with pytest.raises(ValueError, match=f"got page {page}, which is free"):
            allocator.free(pages(page))
    allocator.resize(4)
    assert len(allocator.plan_moves().src) == 0


def test_moves_can_have_a_target_size_and_be_done_in_part():
    allocator = PageAllocator(10)
    allocator.alloc(10)
    allocator.free(pages(0, 2, 3, 5, 6, 8))
    moves = allocator.plan_moves(8)
    assert (moves.src.tolist(), moves.dst.tolist()) == ([9], [0])
    with pytest.raises(ValueError, match="num_pages must have 3 free pages below it, got 3 with 2"):
        allocator.plan_moves(3)
    with pytest.raises(ValueError, match=re.escape("num_pages must be in [0, 10], got 11")):
        allocator.plan_moves(11)
    everything = allocator.plan_moves()
    allocator.move(Moves(src=everything.src[1:2], dst=everything.dst[1:2]))
    assert allocator.held_pages().tolist() == [1, 2, 4, 9]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (pages(0), pages(4), "pages must be held, got page 0, which is free"),
        (pages(1), pages(4), "destinations must be free, got page 4"),
        (pages(1), pages(10), "destinations must be in [0, 10), got page 10"),
        (pages(1), pages(0, 2), "one destination for each source"),
        (pages(1, 1), pages(0, 2), "moves must have distinct pages"),
    ],
)
def test_a_wrong_move_changes_nothing(src: NDArray[np.int32], dst: NDArray[np.int32], message: str):
    allocator = PageAllocator(10)
    allocator.alloc(10)
    allocator.free(pages(0, 2, 3, 5, 6, 8))
    with pytest.raises(ValueError, match=re.escape(message)):
        allocator.move(Moves(src=src, dst=dst))
    assert allocator.held_pages().tolist() == [1, 4, 7, 9]


def test_importing_the_package_imports_no_torch():
    # A fresh interpreter: other tests of this process import torch.
    import subprocess

    code = "import sys, pagewood.kvpool, pagewood.kvpool.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_one_call_evicts_what_is_lacking_and_allocates() -> None:
    allocator = PageAllocator(8)
    cached = [allocator.alloc(5)]
    asked: list[int] = []

    def evict(num_pages: int) -> NDArray[np.int32]:
        asked.append(num_pages)
        given, cached[0] = cached[0][:num_pages], cached[0][num_pages:]
        return given

    row = np.zeros(4, np.int32)
    assert sorted(allocator.alloc(4, out=row, evict=evict).tolist()) == [0, 5, 6, 7]
    assert asked == [1]
    assert sorted(row.tolist()) == [0, 5, 6, 7]
    with pytest.raises(OutOfPages):
        allocator.alloc(5, evict=evict)  # the cache has four pages: they are free now, and not lost
    assert (asked, allocator.num_free) == ([1, 5], 4)
    allocator.free(row)
    assert allocator.alloc(8, evict=evict).shape == (8,)
    assert asked == [1, 5]
