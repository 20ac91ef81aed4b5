"""The conformance tests detect allocators with one fault each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)
from numpy.typing import NDArray

from pagewood.kvpool import Moves, OutOfPages, PageAllocator
from pagewood.kvpool.testing import allocator_conformance, elastic_allocator_conformance

Alloc = Callable[[PageAllocator, int], NDArray[np.int32]]
Free = Callable[[PageAllocator, NDArray[np.int32]], None]
Batch = Callable[[PageAllocator], AbstractContextManager[None]]


SHARED = np.zeros(100, dtype=np.int32)


class Faulty:
    """A correct allocator with some methods replaced."""

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


def alloc_fewer_if_scarce(inner: PageAllocator, n: int) -> NDArray[np.int32]:
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


def alloc_error_without_numbers(inner: PageAllocator, n: int) -> NDArray[np.int32]:
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


def free_without_naming_the_page(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    try:
        inner.free(pages)
    except ValueError:
        raise ValueError("wrong page") from None


def free_nothing(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    if not np.isin(pages, inner.held_pages()).all() or len(np.unique(pages)) < len(pages):
        inner.free(pages)


def free_negative_index(inner: PageAllocator, pages: NDArray[np.int32]) -> None:
    """Treat -1 as the last page, as an index does."""
    inner.free(np.where(pages < 0, pages + inner.num_pages, pages).astype(np.int32))


def free_at_once(inner: PageAllocator) -> AbstractContextManager[None]:
    return nullcontext()


def fails(make_allocator: Callable[[int], Faulty], *, max_examples: int = 150) -> bool:
    return machine_fails(allocator_conformance(make_allocator), max_examples=max_examples)


def machine_fails(machine: type[RuleBasedStateMachine], *, max_examples: int = 150) -> bool:
    profile = settings(
        max_examples=max_examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        print_blob=False,
        derandomize=True,
    )
    try:
        run_state_machine_as_test(machine, settings=profile)
    except (AssertionError, ValueError, OutOfPages, BaseExceptionGroup):
        return True
    return False


def test_a_correct_allocator_passes():
    assert not fails(Faulty, max_examples=40)


@pytest.mark.parametrize(
    "fault",
    [
        alloc_fewer_if_scarce,
        alloc_before_refusing,
        alloc_one_page_twice,
        alloc_int64,
        alloc_a_view_of_shared_memory,
        alloc_error_without_numbers,
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
        free_without_naming_the_page,
        free_nothing,
        free_negative_index,
    ],
)
def test_a_fault_in_free_is_caught(fault: Free):
    assert fails(lambda num_pages: Faulty(num_pages, free=fault))


def test_batched_frees_that_take_effect_at_once_are_caught():
    assert fails(lambda num_pages: Faulty(num_pages, batched_frees=free_at_once))


class FaultyMethod:
    """A correct allocator with one method replaced."""

    def __init__(self, inner: PageAllocator, method: str, fault: Callable[..., object]):
        self.inner, self.method, self.fault = inner, method, fault

    def __getattr__(self, name: str) -> Any:
        return partial(self.fault, self.inner) if name == self.method else getattr(self.inner, name)


def reserve_without_limit(inner: PageAllocator, n: int) -> None:
    inner.reserve(min(n, inner.num_free))


def unreserve_without_limit(inner: PageAllocator, n: int) -> None:
    inner.unreserve(max(0, min(n, inner.num_reserved)))


def resize_up_only(inner: PageAllocator, num_pages: int) -> None:
    inner.resize(max(num_pages, inner.num_pages))


def resize_and_forget_what_is_reserved(inner: PageAllocator, num_pages: int) -> None:
    num_reserved = inner.num_reserved
    inner.unreserve(num_reserved)
    inner.resize(num_pages)
    inner.reserve(min(num_reserved, inner.num_free))


def plan_for_the_fewest_pages(inner: PageAllocator, num_pages: int | None = None) -> Moves:
    return inner.plan_moves()


def plan_nothing(inner: PageAllocator, num_pages: int | None = None) -> Moves:
    inner.plan_moves(num_pages)
    return Moves(src=np.empty(0, dtype=np.int32), dst=np.empty(0, dtype=np.int32))


def move_nothing(inner: PageAllocator, moves: Moves) -> None:
    before = inner.held_pages()
    inner.move(moves)
    back = np.setdiff1d(inner.held_pages(), before), np.setdiff1d(before, inner.held_pages())
    inner.move(Moves(src=back[0], dst=back[1]))


def move_what_is_held(inner: PageAllocator, moves: Moves) -> None:
    is_held = np.isin(moves.src, inner.held_pages())
    is_right = len(moves.src) != len(moves.dst) or is_held
    inner.move(Moves(src=moves.src[is_right], dst=moves.dst[is_right]))


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("reserve", reserve_without_limit),
        ("unreserve", unreserve_without_limit),
        ("resize", resize_up_only),
        ("resize", resize_and_forget_what_is_reserved),
        ("plan_moves", plan_for_the_fewest_pages),
        ("plan_moves", plan_nothing),
        ("move", move_nothing),
        ("move", move_what_is_held),
    ],
)
def test_a_fault_of_an_elastic_allocator_is_caught(method: str, fault: Callable[..., object]):
    def make(num_pages: int) -> Any:
        return FaultyMethod(PageAllocator(num_pages), method, fault)

    assert machine_fails(elastic_allocator_conformance(make))
