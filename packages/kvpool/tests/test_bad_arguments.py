"""Every public function answers arguments of a wrong type with its documented ValueError, and changes nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pagewood.kvpool import (
    LatentLayout,
    Moves,
    MultiHeadLayout,
    PageAllocator,
    PageArray,
)
from pagewood.kvpool.tiers import DiskTier, HostTier, KeyChain, PrefetchPolicy, SharedFolder, ThreadLane

NOT_WHOLE: list[Any] = [1.0, 1.5, float("nan"), True, None, "1", np.float32(1), np.bool_(True), [1]]
NOT_VECTORS: list[Any] = [
    [0], (0,), 0, 0.0, None, "x", True, range(1), np.int32(0), np.array(0, np.int32), np.zeros((1, 1), np.int32),
    np.zeros(1), np.zeros(1, np.uint8), np.zeros(0), np.zeros(1, np.bool_), np.zeros(1, ">i4"), [],
]  # fmt: skip
LAYOUT: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 4}

CountCall = Callable[[Any, Path], object]
COUNTS: dict[str, CountCall] = {
    "PageAllocator": lambda n, _: PageAllocator(n),
    "PageAllocator.alloc": lambda n, _: PageAllocator(4).alloc(n),
    "PageAllocator.alloc evict": lambda n, _: PageAllocator(1).alloc(n, evict=lambda _: np.zeros(0, np.int32)),
    "PageAllocator.reserve": lambda n, _: PageAllocator(4).reserve(n),
    "PageAllocator.unreserve": lambda n, _: PageAllocator(4).unreserve(n),
    "PageAllocator.resize": lambda n, _: PageAllocator(4).resize(n),
    "MultiHeadLayout": lambda n, _: MultiHeadLayout(**{**LAYOUT, "head_dim": n}),
    "LatentLayout": lambda n, _: LatentLayout(num_layers=1, latent_dim=n, rope_dim=2, page_size=4),
    "MultiHeadLayout.pages_for": lambda n, _: MultiHeadLayout(**LAYOUT).pages_for(n),
    "PageArray": lambda n, _: PageArray(name="kv", dtype="int8", shape=(n,)),
    "HostTier": lambda n, _: HostTier(page_bytes=n, num_pages=1),
    "HostTier pages": lambda n, _: HostTier(page_bytes=1, num_pages=n),
    "DiskTier": lambda n, path: DiskTier(path / "file", page_bytes=n, num_bytes=100),
    "DiskTier bytes": lambda n, path: DiskTier(path / "file", page_bytes=1, num_bytes=n),
    "SharedFolder": lambda n, path: SharedFolder(path, page_bytes=n, num_bytes=100),
    "SharedFolder bytes": lambda n, path: SharedFolder(path, page_bytes=1, num_bytes=n),
    "KeyChain": lambda n, _: KeyChain(n, fingerprint=b""),
    "PrefetchPolicy": lambda n, _: PrefetchPolicy(min_tokens=n),
    "ThreadLane": lambda n, _: ThreadLane("lane", max_bytes_in_flight=n),
}


ONE = np.ones(1, np.int32)
VECTORS: dict[str, Callable[[Any], object]] = {
    "PageAllocator.free": lambda array: held().free(array),
    "PageAllocator.alloc out": lambda array: PageAllocator(4).alloc(3, out=cast("Any", [] if array is None else array)),
    "PageAllocator.alloc evict": lambda array: PageAllocator(1).alloc(2, evict=lambda _: array),
    "PageAllocator.move src": lambda array: held().move(Moves(src=array, dst=ONE)),
    "PageAllocator.move dst": lambda array: held().move(Moves(src=ONE, dst=array)),
}


def held() -> PageAllocator:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    return allocator


@pytest.mark.parametrize("name", COUNTS)
def test_a_number_that_is_not_whole_or_out_of_range_is_a_value_error(name: str, tmp_path: Path) -> None:
    """No rule forbids a large number in most of them; it is a matter of memory."""
    large = [2**70] if name in ("PageAllocator", "PageAllocator.unreserve") else []
    for value in (*NOT_WHOLE, -1, -(2**70), *large):
        with pytest.raises(ValueError, match=r"^\w+ must "):
            pytest.fail(f"{value!r} was taken: {COUNTS[name](value, tmp_path)}")


def test_integers_of_numpy_are_whole_numbers(tmp_path: Path) -> None:
    out_of_range = ("PageAllocator.unreserve", "PageAllocator.alloc evict", "MultiHeadLayout.pages_for")
    for name in COUNTS.keys() - set(out_of_range):
        COUNTS[name](np.int64(1), tmp_path / name)
    assert MultiHeadLayout(**LAYOUT).pages_for(cast("int", np.int64(10_000))) == 10_000 // 256


@pytest.mark.parametrize("name", VECTORS)
def test_what_is_not_an_array_of_the_right_type_is_a_value_error(name: str) -> None:
    for value in NOT_VECTORS:
        with pytest.raises(ValueError, match=r"^\w+ must "):
            pytest.fail(f"{value!r} was taken: {VECTORS[name](value)}")


def test_a_refused_call_changes_nothing() -> None:
    allocator = held()
    for value in (*NOT_VECTORS, np.array([0, 0], np.int32), np.array([-1], np.int32), np.array([9], np.int32)):
        with pytest.raises(ValueError, match="pages must"):
            allocator.free(value)
    assert (allocator.num_free, allocator.held_pages().tolist()) == (2, [0, 1])
    allocator.free(np.zeros(0, np.int32))
    allocator.free(np.array([1, 0], np.int32))
    assert allocator.num_free == 4
