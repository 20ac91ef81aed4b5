import numpy as np
import pytest

from pagewood.kvpool.tiers import HostTier


def filled(*names: bytes, num_pages: int = 4) -> HostTier:
    host = HostTier(page_bytes=8, num_pages=num_pages)
    for name, slot in zip(names, host.take(len(names)), strict=True):
        assert host.put(name, slot)
    return host


def test_the_least_recently_used_page_makes_room_and_the_end_of_a_prefix_first() -> None:
    host = filled(b"a", b"b", b"c", b"x")
    host.touch([b"a", b"b", b"c"])
    host.take(2)
    assert [key in host for key in (b"a", b"b", b"c", b"x")] == [True, True, False, False]


def test_pinned_pages_stay() -> None:
    host = filled(b"a", b"b", num_pages=3)
    slot = host.slot_of(b"a")
    assert slot is not None
    host.pin([slot])
    assert len(host.take(3)) == 2
    assert (b"a" in host, host.num_pinned, host.num_taken) == (True, 1, 2)
    host.unpin([slot])
    assert host.take(1) == [slot]


def test_the_slot_of_a_page_that_is_already_held_becomes_free() -> None:
    host = filled(b"a")
    (slot,) = host.take(1)
    assert not host.put(b"a", slot)
    assert (host.num_held, host.num_taken) == (1, 0)


def test_wrong_sizes_are_errors() -> None:
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        HostTier(page_bytes=8, num_pages=0)
    with pytest.raises(ValueError, match="page_bytes must be >= 1, got -1"):
        HostTier(page_bytes=-1, num_pages=1)
    with pytest.raises(ValueError, match=r"memory must be uint8 of shape \(2, 8\), got uint8 of shape \(3, 8\)"):
        HostTier(page_bytes=8, num_pages=2, memory=np.zeros((3, 8), np.uint8))


def test_its_memory_is_aligned_and_empty() -> None:
    for page_bytes, num_pages in ((1, 1), (100, 7), (2**20 + 1, 10)):
        memory = HostTier(page_bytes=page_bytes, num_pages=num_pages).memory
        assert memory.shape == (num_pages, page_bytes)
        assert memory.ctypes.data % 4096 == 0
        assert not memory.any()
