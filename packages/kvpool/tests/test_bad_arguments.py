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
    RowPool,
    TicketPool,
    WindowedLayout,
    ragged_pages,
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
    "TicketPool": lambda n, _: TicketPool(n),
    "TicketPool.alloc": lambda n, _: TicketPool(4).alloc(n),
    "TicketPool.row": lambda n, _: TicketPool(4).row(n),
    "RowPool rows": lambda n, _: RowPool(n, 4),
    "RowPool pages": lambda n, _: RowPool(4, n),
    "RowPool.alloc": lambda n, _: RowPool(4, 4).alloc(n),
    "RowPool.pages": lambda n, _: RowPool(4, 4).pages(n),
    "RowPool.truncate": lambda n, _: RowPool(4, 4).truncate(n, 0),
    "RowPool.truncate pages": lambda n, _: (pool := RowPool(4, 4)).truncate(pool.alloc(1)[0], n),
    "MultiHeadLayout": lambda n, _: MultiHeadLayout(**{**LAYOUT, "head_dim": n}),
    "MultiHeadLayout.pages_for": lambda n, _: MultiHeadLayout(**LAYOUT).pages_for(n),
    "LatentLayout": lambda n, _: LatentLayout(num_layers=1, latent_dim=8, rope_dim=8, page_size=n),
    "WindowedLayout": lambda n, _: WindowedLayout(kv=MultiHeadLayout(**LAYOUT), window=n, max_step=1),
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


def one_ticket() -> tuple[RowPool, Any]:
    pool = RowPool(4, 4)
    return pool, pool.alloc(1)


ONE = np.ones(1, np.int32)
VECTORS: dict[str, Callable[[Any], object]] = {
    "PageAllocator.free": lambda array: held().free(array),
    "PageAllocator.alloc out": lambda array: PageAllocator(4).alloc(3, out=cast("Any", [] if array is None else array)),
    "PageAllocator.alloc evict": lambda array: PageAllocator(1).alloc(2, evict=lambda _: array),
    "PageAllocator.move src": lambda array: held().move(Moves(src=array, dst=ONE)),
    "PageAllocator.move dst": lambda array: held().move(Moves(src=ONE, dst=array)),
    "TicketPool.free": lambda array: TicketPool(4).free(array),
    "TicketPool.rows": lambda array: TicketPool(4).rows(array),
    "RowPool.free": lambda array: RowPool(4, 4).free(array),
    "RowPool.rows": lambda array: RowPool(4, 4).rows(array),
    "RowPool.num_pages": lambda array: RowPool(4, 4).num_pages(array),
    "RowPool.append tickets": lambda array: RowPool(4, 4).append(array, ONE, ONE),
    "RowPool.append pages": lambda array: (it := one_ticket())[0].append(it[1], array, ONE),
    "RowPool.append counts": lambda array: (it := one_ticket())[0].append(it[1], ONE, array),
}


def held() -> PageAllocator:
    allocator = PageAllocator(4)
    allocator.alloc(2)
    return allocator


@pytest.mark.parametrize("value", [*NOT_WHOLE, -1, 2**70, -(2**70)], ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_number_that_is_not_whole_or_out_of_range_is_a_value_error(name: str, value: Any, tmp_path: Path) -> None:
    if (
        isinstance(value, int)
        and value == 2**70
        and name not in ("PageAllocator", "PageAllocator.unreserve", "TicketPool", "TicketPool.row")
    ):
        pytest.skip("no rule forbids a large number here; it is a matter of memory")
    with pytest.raises(ValueError, match=r"^\w+ must "):
        COUNTS[name](value, tmp_path)


@pytest.mark.parametrize("name", [name for name in COUNTS if name not in ("TicketPool.row", "RowPool.truncate")])
def test_integers_of_numpy_are_whole_numbers(name: str, tmp_path: Path) -> None:
    if name in ("PageAllocator.unreserve", "RowPool.pages", "RowPool.truncate pages", "PageAllocator.alloc evict"):
        pytest.skip("1 is out of range")
    if name == "MultiHeadLayout.pages_for":
        assert MultiHeadLayout(**LAYOUT).pages_for(cast("int", np.int64(10_000))) == 10_000 // 256
        return
    COUNTS[name](np.int64(1), tmp_path)


@pytest.mark.parametrize("value", NOT_VECTORS, ids=repr)
@pytest.mark.parametrize("name", VECTORS)
def test_what_is_not_an_array_of_the_right_type_is_a_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^\w+ must "):
        VECTORS[name](value)


def test_a_refused_call_changes_nothing() -> None:
    allocator = held()
    for value in (*NOT_VECTORS, np.array([0, 0], np.int32), np.array([-1], np.int32), np.array([9], np.int32)):
        with pytest.raises(ValueError, match="pages must"):
            allocator.free(value)
    assert (allocator.num_free, allocator.held_pages().tolist()) == (2, [0, 1])
    allocator.free(np.zeros(0, np.int32))
    allocator.free(np.array([1, 0], np.int32))
    assert allocator.num_free == 4


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"table": [[0]]}, "table must be an array of integers with 2 dimensions"),
        ({"table": np.zeros((1, 1))}, "table must be an array of integers with 2 dimensions"),
        ({"rows": [0]}, "rows must be an array of integers with 1 dimensions"),
        ({"rows": np.zeros(1)}, "rows must be an array of integers with 1 dimensions"),
        ({"rows": np.array([-1])}, r"rows must be in \[0, 2\)"),
        ({"rows": np.array([2])}, r"rows must be in \[0, 2\)"),
        ({"num_tokens": 1}, "num_tokens must be an array of integers with 1 dimensions"),
        ({"num_tokens": np.ones(1)}, "num_tokens must be an array of integers with 1 dimensions"),
        ({"page_size": 1.0}, "page_size must be an integer"),
        ({"page_size": 0}, "page_size must be >= 1"),
    ],
)
def test_ragged_pages_checks_its_arguments(changed: dict[str, Any], rule: str) -> None:
    good: dict[str, Any] = {
        "table": np.arange(4, dtype=np.int32).reshape(2, 2), "rows": np.array([1]),
        "num_tokens": np.array([3], np.int32), "page_size": 2,
    }  # fmt: skip
    assert ragged_pages(**good).indices.tolist() == [2, 3]
    with pytest.raises(ValueError, match=rule):
        ragged_pages(**{**good, **changed})
