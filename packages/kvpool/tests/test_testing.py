"""The conformance suite catches allocators that are wrong in one way each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test  # pyright: ignore[reportUnknownVariableType]
from numpy.typing import NDArray

from pagewood.kvpool import OutOfPages, PageAllocator
from pagewood.kvpool.testing import allocator_conformance

Alloc = Callable[[PageAllocator, int], NDArray[np.int32]]
Free = Callable[[PageAllocator, NDArray[np.int32]], None]
Batch = Callable[[PageAllocator], AbstractContextManager[None]]


SHARED = np.zeros(100, dtype=np.int32)


class Faulty:
    """A right allocator with some methods replaced."""

    def __init__(
        self,
        num_pages: int,
        *,
        alloc: Alloc = PageAllocator.alloc,
        free: Free = PageAllocator.free,
        batched_frees: Batch = PageAllocator.batched_frees,
    ):
        self.inner = PageAllocator(num_pages)
        self.alloc_fault, self.free_fault, self.batch_fault = alloc, free, batched_frees

    @property
    def num_pages(self) -> int:
        return self.inner.num_pages

    @property
    def num_free(self) -> int:
        return self.inner.num_free

    def alloc(self, n: int) -> NDArray[np.int32]:
        return self.alloc_fault(self.inner, n)

    def free(self, pages: NDArray[np.int32]) -> None:
        self.free_fault(self.inner, pages)

    def batched_frees(self) -> AbstractContextManager[None]:
        return self.batch_fault(self.inner)


def alloc_what_is_left(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    return inner.alloc(min(n, inner.num_free))


def alloc_before_refusing(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    if n > inner.num_free:
        requested, available = n, inner.num_free
        inner.alloc(available)
        raise OutOfPages(requested, available)
    return inner.alloc(n)


def alloc_one_page_twice(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    pages = inner.alloc(n)
    pages[-1:] = pages[:1]
    return pages


def alloc_int64(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    return inner.alloc(n).astype(np.int64)  # pyright: ignore[reportReturnType]


def alloc_a_view_of_shared_memory(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    SHARED[:n] = inner.alloc(n)
    return SHARED[:n]


def alloc_and_forget_the_numbers(inner: PageAllocator, n: int) -> NDArray[np.int32]:
    try:
        return inner.alloc(n)
    except OutOfPages:
        raise OutOfPages(n, 0) from None


def free_only_what_is_held(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    inner.free(np.intersect1d(pages, inner.held_pages()).astype(np.int32))


def free_distinct(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    inner.free(np.unique(pages))


def free_until_the_first_wrong_page(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    for page in pages:
        inner.free(np.array([page], dtype=np.int32))


def free_without_a_name(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    try:
        inner.free(pages)
    except ValueError:
        raise ValueError("wrong page") from None


def free_nothing(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    if not np.isin(pages, inner.held_pages()).all() or len(np.unique(pages)) < len(pages):
        inner.free(pages)


def free_from_behind(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    """Take -1 for the last page, as an index would."""
    inner.free(np.where(pages < 0, pages + inner.num_pages, pages).astype(np.int32))


def free_at_once(inner: PageAllocator) -> AbstractContextManager[None]:
    return nullcontext()


def fails(make_allocator: Callable[[int], Faulty]) -> bool:
    machine = allocator_conformance(make_allocator)
    profile = settings(max_examples=150, phases=[Phase.generate], database=None, deadline=None, print_blob=False)
    try:
        run_state_machine_as_test(machine, settings=profile)
    except (AssertionError, ValueError, OutOfPages, BaseExceptionGroup):
        return True
    return False


def test_a_right_allocator_passes():
    assert not fails(Faulty)


@pytest.mark.parametrize(
    "fault",
    [
        alloc_what_is_left,
        alloc_before_refusing,
        alloc_one_page_twice,
        alloc_int64,
        alloc_a_view_of_shared_memory,
        alloc_and_forget_the_numbers,
    ],
)
def test_a_fault_in_alloc_is_caught(fault: Alloc):
    assert fails(lambda num_pages: Faulty(num_pages, alloc=fault))


@pytest.mark.parametrize(
    "fault",
    [
        free_only_what_is_held,
        free_distinct,
        free_until_the_first_wrong_page,
        free_without_a_name,
        free_nothing,
        free_from_behind,
    ],
)
def test_a_fault_in_free_is_caught(fault: Free):
    assert fails(lambda num_pages: Faulty(num_pages, free=fault))


def test_batched_frees_that_are_not_held_back_are_caught():
    assert fails(lambda num_pages: Faulty(num_pages, batched_frees=free_at_once))
