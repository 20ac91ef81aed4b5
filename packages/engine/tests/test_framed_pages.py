"""Pages that are frames as images: what comes back, what a copy keeps, and what is said about windows that are gone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewood.engine.assembly.tiers import framed_pages
from pagewood.engine.assembly.tiers.framed_pages import FramedPages
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.messages.arrays import Int32
from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import ArrayPages
from seeded_faults import Edit, seed_fault

FRAME_BYTES, BESIDE_BYTES, NUM_FRAMES = 16, 24, 40
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 8), (None, None, 8, 8), (8,), (8, 8))


class Bench:
    """Frames with known bytes, and memory on the host for images. A window reaches back two pages."""

    def __init__(self, windows: tuple[int | None, ...], *, has_beside: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.frames: NDArray[np.uint8] = rng.integers(0, 256, (NUM_FRAMES, FRAME_BYTES), np.uint8)
        self.beside: NDArray[np.uint8] = rng.integers(0, 256, (NUM_FRAMES, BESIDE_BYTES), np.uint8)
        self.groups = PageGroups(
            windows, frames=PageAllocator(NUM_FRAMES), ids=PageAllocator(NUM_FRAMES), page_size=4, num_ahead=4
        )
        beside = ArrayPages([[self.beside]]) if has_beside else None
        self.pages = FramedPages(ArrayPages([[self.frames]]), self.groups, beside=beside)
        self.host: NDArray[np.uint8] = np.full((10, self.pages.page_bytes), 255, np.uint8)

    def cached(self, n: int) -> list[int]:
        """Return pages that the cache owns and no request uses."""
        pages = self.groups.alloc(n)
        self.groups.adopt(pages)
        self.groups.let_go(pages)
        return pages.tolist()

    def loaded(self, slots: list[int]) -> list[int]:
        """Return pages for a hit, with what images hold."""
        pages = self.groups.alloc_for_hit(len(slots)).tolist()
        self.pages.write(pages, self.host, slots, lambda _: None)
        return pages

    def holds(self, page: int) -> list[bytes | None]:
        """Return the bytes of a page in each group, and those beside."""
        rows: list[int] = self.groups.frames_of(ids(page))[:, 0].tolist()
        return [None if row < 0 else self.frames[row].tobytes() for row in rows] + [self.beside[page].tobytes()]

    def violation(self) -> str | None:
        return self.groups.violation((), 0)


def ids(*pages: int) -> Int32:
    return np.array(pages, np.int32)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("has_beside", [False, True])
def test_what_a_hit_reads_comes_back(windows: tuple[int | None, ...], has_beside: bool) -> None:
    bench = Bench(windows, has_beside=has_beside)
    first = bench.cached(5)
    expected = [bench.holds(page) for page in first]
    bench.pages.read(first, bench.host, [9, 2, 3, 4, 7])
    loaded = bench.loaded([9, 2, 3, 4, 7])
    for place, page in enumerate(loaded):
        found = bench.holds(page)
        for group, window in enumerate(windows):
            assert found[group] == (expected[place][group] if window is None or place >= 3 else None)
        assert not has_beside or found[-1] == expected[place][-1]
    bench.pages.adopt(loaded, bench.host, [9, 2, 3, 4, 7])
    assert bench.groups.num_usable(ids(*loaded)) == 5
    assert bench.violation() is None


@pytest.mark.parametrize("windows", WINDOWS)
def test_an_image_without_windows_leaves_none(windows: tuple[int | None, ...]) -> None:
    bench = Bench(windows)
    first = bench.cached(3)
    bench.groups.drop_windows(ids(first[1]))
    bench.pages.read(first, bench.host, [0, 1, 2])
    loaded = bench.loaded([0, 1, 2])
    bench.pages.adopt(loaded, bench.host, [0, 1, 2])
    assert [bench.holds(page)[-2] is None for page in loaded] == [True, True, False]
    assert bench.groups.num_usable(ids(*loaded)) == 0
    assert bench.violation() is None


def test_a_copy_keeps_the_frames_that_it_reads() -> None:
    bench = Bench((None, 8))
    pages = bench.cached(4)
    bench.pages.hold(pages[:2])
    assert set(bench.groups.to_trim(NUM_FRAMES, ends=True).tolist()) == set(pages[2:])
    assert bench.violation() is None
    bench.pages.let_go(pages[:2])
    assert set(bench.groups.to_trim(NUM_FRAMES, ends=True).tolist()) == set(pages)
    assert bench.violation() is None


def test_cached_pages_are_filled_where_they_lack_what_a_hit_reads() -> None:
    bench = Bench((None, 8))
    pages = bench.cached(4)
    expected = bench.holds(pages[3])
    bench.pages.read(pages[2:], bench.host, [0, 1])
    assert bench.pages.first_lacking(pages, 4) == 4
    bench.groups.drop_windows(ids(*pages))
    assert bench.pages.first_lacking(pages, 4) == 2
    assert bench.pages.first_lacking(pages, 5) == 3
    assert bench.pages.first_lacking(pages, 6) == 4
    loaded = bench.loaded([0, 1])
    assert bench.pages.fill(pages[2:], loaded, bench.host, [0, 1]) == 2
    bench.pages.give_back(loaded)
    assert bench.holds(pages[3])[:2] == expected[:2]
    assert bench.groups.num_usable(ids(*pages)) == 4
    assert bench.violation() is None
    bench.groups.free(ids(*loaded, *pages))
    assert bench.groups.num_free == bench.groups.num_pages


FAULTS: dict[str, list[Edit]] = {
    "images without windows count as whole": [
        (framed_pages.FramedPages, "adopt", "_NOTE_BYTES] == 0", "_NOTE_BYTES] < 0")
    ],
    "windows not noted": [(framed_pages.FramedPages, "read", "= frames[-1] >= 0", "= 0")],
    "frames of one group in all": [
        (framed_pages.FramedPages, "read", "_there(row, slots)", "_there(frames[0], slots)")
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_all() -> None:
        for windows in WINDOWS:
            test_what_a_hit_reads_comes_back(windows, has_beside=True)
            test_an_image_without_windows_leaves_none(windows)

    seed_fault(FAULTS[fault], monkeypatch)
    with pytest.raises(AssertionError):
        check_all()
