from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import KVLayout, MultiHeadLayout

small = st.integers(1, 9)
layouts = st.builds(
    MultiHeadLayout,
    num_layers=small,
    num_kv_heads=small,
    head_dim=small,
    page_size=small,
    dtype=st.sampled_from(["float32", "float16"]),
    order=st.sampled_from(["NHD", "HND"]),
)


def test_shapes_are_flashinfers():
    nhd = MultiHeadLayout(num_layers=24, num_kv_heads=8, head_dim=128, page_size=16)
    hnd = MultiHeadLayout(num_layers=24, num_kv_heads=8, head_dim=128, page_size=16, order="HND")
    assert nhd.shape(100) == (100, 2, 16, 8, 128)
    assert hnd.shape(100) == (100, 2, 8, 16, 128)


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_bytes_per_page_count_all_layers_and_both_halves(dtype: str, item_bytes: int):
    layout = MultiHeadLayout(num_layers=24, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype)
    assert layout.bytes_per_page == 24 * 2 * 16 * 8 * 128 * item_bytes


@given(layouts, st.integers(1, 5))
def test_bytes_and_strides_are_those_of_a_contiguous_array(layout: MultiHeadLayout, num_pages: int):
    array = np.empty(layout.shape(num_pages), dtype=layout.dtype)
    assert layout.bytes_per_page * num_pages == array.nbytes * layout.num_layers
    assert tuple(stride // array.itemsize for stride in array.strides) == layout.strides


@given(layouts, st.integers(0, 10**6))
def test_pages_for_is_the_most_that_fit(layout: MultiHeadLayout, num_bytes: int):
    num_pages = layout.pages_for(num_bytes)
    assert num_pages * layout.bytes_per_page <= num_bytes < (num_pages + 1) * layout.bytes_per_page


def test_a_multi_head_layout_is_a_kv_layout():
    layout: KVLayout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=4)
    assert layout.page_size == 4


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_sizes_are_at_least_one(name: str):
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        MultiHeadLayout(**sizes)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'int8'"):
        MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, dtype="int8")
    with pytest.raises(ValueError, match="order must be NHD or HND, got 'DHN'"):
        MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1, order="DHN")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_bytes must be >= 0, got -1"):
        MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=1).pages_for(-1)
