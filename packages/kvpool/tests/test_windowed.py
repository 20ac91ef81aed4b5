import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import MultiHeadLayout, WindowedLayout


def make(*, page_size: int, window: int, max_step: int) -> WindowedLayout:
    kv = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=1, page_size=page_size)
    return WindowedLayout(kv=kv, window=window, max_step=max_step)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 7), st.data())
def test_every_step_finds_all_positions_of_all_its_windows(
    page_size: int, window: int, max_step: int, data: st.DataObject
):
    """The test records in `memory` which position was written to each slot."""
    layout = make(page_size=page_size, window=window, max_step=max_step)
    ring = np.array(data.draw(st.permutations(range(layout.pages_per_request))), dtype=np.int32)
    memory = np.full(layout.pages_per_request * page_size, -1)
    num_tokens = 0
    for num_new in data.draw(st.lists(st.integers(1, max_step), min_size=1, max_size=12)):
        positions = np.arange(num_tokens, num_tokens + num_new, dtype=np.int32)
        num_tokens += num_new
        slots = layout.slots(ring, positions)
        assert slots.dtype == np.int32
        memory[slots] = positions

        pages, first = layout.visible(ring, num_tokens, num_new=num_new)
        assert pages.dtype == np.int32
        seen = memory.reshape(-1, page_size)[pages].ravel()[: num_tokens - first]
        least = max(0, num_tokens - num_new - window + 1)
        assert first <= least < first + page_size
        assert seen[least - first :].tolist() == list(range(least, num_tokens))


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 7))
def test_a_ring_has_no_more_pages_than_it_needs(page_size: int, window: int, max_step: int):
    layout = make(page_size=page_size, window=window, max_step=max_step)
    span = window + max_step - 1
    touched = max((start + span - 1) // page_size + 1 for start in range(page_size))
    assert layout.pages_per_request == touched


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="window must be >= 1, got 0"):
        make(page_size=1, window=0, max_step=1)
    with pytest.raises(ValueError, match="max_step must be >= 1, got 0"):
        make(page_size=1, window=1, max_step=0)
    layout = make(page_size=4, window=8, max_step=4)
    ring = np.arange(layout.pages_per_request, dtype=np.int32)
    for num_new in (0, 5):
        with pytest.raises(ValueError, match=rf"num_new must be in \[1, 4\], got {num_new}"):
            layout.visible(ring, 10, num_new=num_new)
    with pytest.raises(ValueError, match=r"num_new must be in \[1, 2\], got 3"):
        layout.visible(ring, 2, num_new=3)
    with pytest.raises(ValueError, match=rf"ring must have shape \({len(ring)},\), got"):
        layout.visible(ring[1:], 10)
    with pytest.raises(ValueError, match=rf"ring must have shape \({len(ring)},\), got"):
        layout.slots(ring[1:], np.zeros(1, dtype=np.int32))
