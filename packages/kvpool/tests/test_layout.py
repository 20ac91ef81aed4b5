import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import MultiHeadLayout, PageArray, PageLayout, StateLayout

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
small = st.integers(1, 9)
dtypes = st.sampled_from(list(DTYPES))
multi_head = st.builds(
    MultiHeadLayout,
    num_layers=small,
    num_kv_heads=small,
    head_dim=small,
    page_size=small,
    dtype=dtypes,
    order=st.sampled_from(["NHD", "HND"]),
    halves=st.sampled_from(["joint", "pair"]),
)
arrays = st.builds(PageArray, name=st.text(), dtype=dtypes, shape=st.lists(small, min_size=1, max_size=3).map(tuple))
state = st.builds(
    StateLayout,
    num_layers=small,
    arrays=st.lists(arrays, min_size=1, max_size=3, unique_by=lambda array: array.name).map(tuple),
)
layouts = multi_head | state


def test_shapes_are_those_of_flashinfer():
    sizes: dict[str, Any] = {"num_layers": 24, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
    assert MultiHeadLayout(**sizes).shape(100) == (100, 2, 16, 8, 128)
    assert MultiHeadLayout(**sizes, order="HND").shape(100) == (100, 2, 8, 16, 128)
    assert MultiHeadLayout(**sizes, halves="pair").shape(100) == (100, 16, 8, 128)
    assert MultiHeadLayout(**sizes, halves="pair", order="HND").shape(100) == (100, 8, 16, 128)
    assert [array.name for array in MultiHeadLayout(**sizes, halves="pair").arrays] == ["k", "v"]


@pytest.mark.parametrize(("dtype", "item_bytes"), list(DTYPES.items()))
@pytest.mark.parametrize("halves", ["joint", "pair"])
def test_bytes_per_page_count_all_layers_both_halves_and_scales(dtype: str, item_bytes: int, halves: Any):
    layout = MultiHeadLayout(
        num_layers=24, num_kv_heads=8, head_dim=128, page_size=16, dtype=dtype, halves=halves, order="HND"
    )
    scale_bytes = 4 if dtype == "int8" else 0
    assert layout.bytes_per_page == 24 * 2 * 16 * 8 * (128 * item_bytes + scale_bytes)


def test_scales_have_the_axes_of_their_codes_without_the_last():
    joint = MultiHeadLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, dtype="int8", order="HND")
    assert joint.arrays == (
        PageArray(name="kv", dtype="int8", shape=(2, 8, 16, 128)),
        PageArray(name="kv_scales", dtype="float32", shape=(2, 8, 16)),
    )
    pair = MultiHeadLayout(num_layers=1, num_kv_heads=8, head_dim=128, page_size=16, dtype="int8", halves="pair")
    assert [(array.name, array.shape) for array in pair.arrays[2:]] == [("k_scales", (16, 8)), ("v_scales", (16, 8))]


@given(multi_head, st.integers(1, 5))
def test_bytes_and_strides_are_those_of_contiguous_arrays(layout: MultiHeadLayout, num_pages: int):
    items = {1: np.int8, 2: np.int16, 4: np.int32}
    pool = [np.empty((num_pages, *array.shape), dtype=items[DTYPES[array.dtype]]) for array in layout.arrays]
    assert layout.bytes_per_page * num_pages == sum(array.nbytes for array in pool) * layout.num_layers
    assert layout.shape(num_pages) == pool[0].shape
    assert layout.strides == tuple(stride // pool[0].itemsize for stride in pool[0].strides)


@given(layouts, st.integers(0, 10**6))
def test_pages_for_is_the_largest_number_that_fits(layout: PageLayout, num_bytes: int):
    assert layout.bytes_per_page == layout.num_layers * sum(
        math.prod(array.shape) * DTYPES[array.dtype] for array in layout.arrays
    )
    if num_bytes < layout.bytes_per_page:
        with pytest.raises(ValueError, match=f"num_bytes must be >= {layout.bytes_per_page}, .*, got {num_bytes}"):
            layout.pages_for(num_bytes)
    else:
        num_pages = layout.pages_for(num_bytes)
        assert num_pages * layout.bytes_per_page <= num_bytes < (num_pages + 1) * layout.bytes_per_page


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_sizes_of_heads_are_at_least_one(name: str, wrong: int):
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1, name: wrong}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got {wrong}"):
        MultiHeadLayout(**sizes)


def test_unknown_names_are_refused():
    sizes: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "page_size": 1}
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*, int8, got 'int4'"):
        MultiHeadLayout(**sizes, dtype="int4")
    with pytest.raises(ValueError, match="order must be NHD or HND, got 'DHN'"):
        MultiHeadLayout(**sizes, order="DHN")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="halves must be joint or pair, got 'both'"):
        MultiHeadLayout(**sizes, halves="both")  # pyright: ignore[reportArgumentType]


def test_a_states_arrays_are_checked():
    conv = PageArray(name="conv", dtype="bfloat16", shape=(4, 3))
    with pytest.raises(ValueError, match=r"arrays must not be empty and must have distinct names, got \[\]"):
        StateLayout(num_layers=1, arrays=())
    with pytest.raises(ValueError, match=r"distinct names, got \['conv', 'conv'\]"):
        StateLayout(num_layers=1, arrays=(conv, conv))
    with pytest.raises(ValueError, match="num_layers must be >= 1, got 0"):
        StateLayout(num_layers=0, arrays=(conv,))
    with pytest.raises(ValueError, match=r"shape must have at least one axis, each >= 1, got \(4, 0\)"):
        PageArray(name="conv", dtype="bfloat16", shape=(4, 0))
    with pytest.raises(ValueError, match=r"shape must have at least one axis, each >= 1, got \(\)"):
        PageArray(name="conv", dtype="bfloat16", shape=())
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'float64'"):
        PageArray(name="conv", dtype="float64", shape=(1,))
