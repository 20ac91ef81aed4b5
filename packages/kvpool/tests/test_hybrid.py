import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import HybridLayout, MultiHeadLayout, PageArray, StateLayout

FULL = MultiHeadLayout(num_layers=2, num_kv_heads=2, head_dim=8, page_size=16)
STATE = StateLayout(num_layers=3, arrays=(PageArray(name="ssm", dtype="float32", shape=(4, 5, 3)),))


def test_a_page_is_large_enough_for_the_largest_group():
    layout = HybridLayout(groups=(FULL, STATE))
    assert layout.bytes_per_page == FULL.bytes_per_page == 4096
    assert layout.padding_bytes(0) == 0
    assert layout.padding_bytes(1) == 4096 - 3 * 240
    assert layout.offsets(1) == ((0,), (256,), (512,))
    assert layout.pages_for(10_000) == 2


@given(
    st.lists(
        st.builds(
            StateLayout,
            num_layers=st.integers(1, 3),
            arrays=st.lists(
                st.builds(PageArray, name=st.text(), dtype=st.just("int8"), shape=st.tuples(st.integers(1, 200))),
                min_size=1,
                max_size=3,
                unique_by=lambda array: array.name,
            ).map(tuple),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_arrays_of_a_group_are_aligned_and_do_not_overlap(groups: list[StateLayout]):
    layout = HybridLayout(groups=tuple(groups))
    for number, group in enumerate(groups):
        end = 0
        for starts in layout.offsets(number):
            for start, array in zip(starts, group.arrays, strict=True):
                assert start % 64 == 0
                assert end <= start < end + 64
                end = start + array.num_bytes
        assert end <= layout.bytes_per_page
        assert layout.padding_bytes(number) >= 0


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="groups must not be empty"):
        HybridLayout(groups=())
    with pytest.raises(ValueError, match="num_bytes must be >= 4096, the bytes of one page, got 4095"):
        HybridLayout(groups=(FULL, STATE)).pages_for(4095)
