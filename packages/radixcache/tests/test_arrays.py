"""`num_common_items` agrees with a naive comparison."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from pagewood.radixcache.arrays import from_bytes, num_common_items

keys = st.lists(st.integers(-1, 1), max_size=12).map(lambda items: [5, *items])


@given(keys, keys, st.lists(st.integers(0, 9), max_size=3))
def test_num_common_items(left: list[int], right: list[int], before: list[int]) -> None:
    naive = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    left_bytes, right_bytes = np.array(left, np.int32).tobytes(), np.array(before + right, np.int32).tobytes()
    assert num_common_items(left_bytes, right_bytes, 4 * len(before)) == naive


def test_from_bytes_of_no_parts_is_an_empty_array() -> None:
    assert from_bytes([]).tolist() == []
    assert from_bytes([]).dtype == np.int32
