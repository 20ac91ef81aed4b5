import numpy as np
import pytest

from pagewood.radixcache import RadixCache, with_extra_keys

IMAGE = 151_655  # one placeholder id for all positions of all images


def prompt(key: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    tokens = np.array([1, 2, 3, *[IMAGE] * 40, 4, 5, 6, 7, 8], np.int32)
    return with_extra_keys(tokens, [(3, 43, key)])


@pytest.mark.parametrize("page_size", [1, 4])
def test_prompts_share_pages_as_far_as_their_images_agree(page_size: int) -> None:
    cache = RadixCache(page_size)
    num_pages = 48 // page_size
    cache.insert(prompt(b"cat"), np.arange(num_pages, dtype=np.int32))
    assert cache.match(prompt(b"cat")).num_tokens == 48
    assert cache.match(prompt(b"dog")).num_tokens == 3 // page_size * page_size


def test_only_the_positions_of_the_input_change() -> None:
    before = np.array([1, 2, 3, *[IMAGE] * 40, 4, 5, 6, 7, 8], np.int32)
    after = prompt(b"cat")
    assert (after[:3] == before[:3]).all()
    assert (after[43:] == before[43:]).all()
    assert (after[3:43] < 0).all()
    assert len(set(after[3:43].tolist())) == 40
    assert (before[3:43] == IMAGE).all()
    longer = with_extra_keys(np.full(50, IMAGE, np.int32), [(0, 50, b"cat")])
    assert (longer[:40] == after[3:43]).all()  # a cut image agrees as far as it goes


@pytest.mark.parametrize("extras", [[(0, 5, b"")], [(2, 2, b"")], [(-1, 2, b"")], [(0, 3, b"a"), (2, 4, b"b")]])
def test_wrong_positions_are_refused(extras: list[tuple[int, int, bytes]]) -> None:
    with pytest.raises(ValueError, match="extras must be ranges within 4 tokens that do not overlap"):
        with_extra_keys(np.zeros(4, np.int32), extras)
