"""Damage of the kinds that memory, disks and crashes cause, each tried many times."""

from collections.abc import Callable

import numpy as np
import pytest

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.checksum import CHECKSUM_BYTES, checksum

KEY = bytes(range(32))
PAGE_BYTES = 12_000  # not a multiple of a block


def flip(page: Bytes, bit: int) -> None:
    page[bit // 8] ^= 1 << bit % 8


def two_random_bits(rng: np.random.Generator, page: Bytes) -> None:
    for bit in rng.choice(4096 * 8, 2, replace=False).tolist():
        flip(page, bit)


def one_bit_up_and_the_same_bit_of_another_word_down(rng: np.random.Generator, page: Bytes) -> None:
    words = page[: PAGE_BYTES // 8 * 8].view(np.uint64)
    one, two = rng.choice(512, 2, replace=False).tolist()
    mask = np.uint64(1) << np.uint64(rng.integers(64))
    words[two] = (words[two] & ~mask) | (~words[one] & mask)
    words[[one, two]] ^= mask


def two_words_swapped(rng: np.random.Generator, page: Bytes) -> None:
    words = page[: PAGE_BYTES // 8 * 8].view(np.uint64)
    one, two = rng.choice(len(words), 2, replace=False).tolist()
    words[[one, two]] = words[[two, one]]


def two_blocks_swapped(rng: np.random.Generator, page: Bytes) -> None:
    blocks = page[:8192].reshape(2, 4096)
    blocks[:] = blocks[::-1].copy()


def torn(rng: np.random.Generator, page: Bytes) -> None:
    page[rng.integers(PAGE_BYTES) :] = 0


@pytest.mark.parametrize(
    "damage",
    [
        two_random_bits,
        one_bit_up_and_the_same_bit_of_another_word_down,
        two_words_swapped,
        two_blocks_swapped,
        torn,
    ],
)
def test_no_kind_of_damage_is_missed(damage: Callable[[np.random.Generator, Bytes], None]) -> None:
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(2000):
        page = rng.integers(0, 256, PAGE_BYTES, np.uint8)
        before, original = checksum(KEY, page), page.copy()
        damage(rng, page)
        missed += checksum(KEY, page) == before and not np.array_equal(page, original)
    assert missed == 0


def test_every_bit_of_key_and_page_counts() -> None:
    page = np.random.default_rng(0).integers(0, 256, 300, np.uint8)
    sums = {checksum(KEY, page), checksum(KEY, page[:-1])}
    for bit in range(page.size * 8):
        flip(page, bit)
        sums.add(checksum(KEY, page))
        flip(page, bit)
    for bit in range(256):
        key = np.frombuffer(KEY, np.uint8).copy()
        flip(key, bit)
        sums.add(checksum(key.tobytes(), page))
    assert len(sums) == 2 + page.size * 8 + 256


def test_the_checksum_is_the_same_on_every_machine() -> None:
    """Files outlive a process, and machines share them."""
    assert checksum(bytes(32), np.arange(100, dtype=np.uint8)).hex() == "6f1203284a356531a90423a98c346aa6"
    assert len(checksum(bytes(32), np.zeros(0, np.uint8))) == CHECKSUM_BYTES
