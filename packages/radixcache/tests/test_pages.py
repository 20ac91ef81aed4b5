from random import Random

import numpy as np
import pytest

from pagewood.radixcache.pages import PageSet


@pytest.mark.parametrize("most", [4, 16, 17, 64, 400])  # below and above the number at which the method changes
def test_a_set_of_pages_is_a_set(most: int) -> None:
    rng, pages = Random(most), PageSet()
    held: set[int] = set()
    for _ in range(300):
        some = rng.choices(range(-1, 3000), k=rng.randint(0, most)) if rng.random() < 0.2 else []
        fresh = rng.sample(sorted(set(range(3000)) - held), rng.randint(0, most)) if len(held) < 2500 else []
        offered = fresh + [page for page in some if rng.random() < 0.1]
        rng.shuffle(offered)
        is_right = len(set(offered)) == len(offered) and not held & set(offered) and min(offered, default=0) >= 0
        if is_right:
            pages.adopt(np.array(offered, np.int32))
            held |= set(offered)
        else:
            with pytest.raises(ValueError, match="pages must"):
                pages.adopt(np.array(offered, np.int32))
        dropped = rng.sample(sorted(held), min(len(held), rng.randint(0, most)))
        pages.drop(np.array(dropped, np.int32))
        held -= set(dropped)
        assert len(pages) == len(held)
        assert all(page in pages for page in held)
        assert not any(page in pages for page in dropped)


def test_many_consecutive_pages() -> None:
    pages, consecutive = PageSet(), np.arange(100, 400, dtype=np.int32)
    pages.adopt(np.random.default_rng(0).permutation(consecutive).astype(np.int32))
    assert (len(pages), 99 in pages, 100 in pages, 399 in pages, 400 in pages) == (300, False, True, True, False)
    with pytest.raises(ValueError, match="already, got page 399"):
        pages.adopt(np.arange(399, 700, dtype=np.int32))
    with pytest.raises(ValueError, match="already, got page 100"):
        pages.adopt(np.arange(0, 101, dtype=np.int32))
    with pytest.raises(ValueError, match="got page -1"):
        pages.adopt(np.arange(-1, 99, dtype=np.int32))
    assert len(pages) == 300
    pages.drop(consecutive[1:-1])
    pages.adopt(consecutive[1:-1])
    assert len(pages) == 300


@pytest.mark.parametrize(
    ("number", "span"),
    [
        (50, 100),
        (5000, 10_000),
        (262, 1000),  # the two are 255 places apart, so both get the same mark in the first round
        (65_100, 200_000),  # more than there are marks for
    ],
)
def test_many_pages_with_one_twice(number: int, span: int) -> None:
    pages, some = PageSet(), np.random.default_rng(1).choice(span, number, replace=False).astype(np.int32)
    twice = np.concatenate([some, some[7:8]])
    with pytest.raises(ValueError, match=f"distinct, got page {some[7]} twice"):
        pages.adopt(twice)
    assert len(pages) == 0
    pages.adopt(some)
    with pytest.raises(ValueError, match=f"distinct, got page {some[7]} twice"):
        pages.adopt(twice)
    assert len(pages) == number


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_pages_in_a_few_runs(seed: int) -> None:
    rng, pages = Random(seed), PageSet()
    held: set[int] = set()
    for _ in range(60):
        starts = [rng.randrange(-3, 40_000) for _ in range(rng.randint(1, 4))]
        runs = [range(start, start + rng.choice([1, 600, 2500, 5000])) for start in starts]
        offered = [page for run in runs for page in run]
        if len(set(offered)) == len(offered) and not held & set(offered) and min(offered) >= 0:
            pages.adopt(np.array(offered, np.int32))
            held |= set(offered)
        else:
            with pytest.raises(ValueError, match="pages must"):
                pages.adopt(np.array(offered, np.int32))
        dropped = {page for page in range(*sorted(rng.sample(range(42_000), 2))) if page in held}
        pages.drop(np.array(sorted(dropped), np.int32))
        held -= dropped
        assert len(pages) == len(held)
        assert all(page in pages for page in held)


def test_a_page_that_wraps_around_is_negative() -> None:
    high, low = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    with pytest.raises(ValueError, match=f"pages must be >= 0, got page {low}"):
        PageSet().adopt(np.concatenate([np.arange(5000), [high, low]]).astype(np.int32))
