from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.pages import pages_of, round_up


@given(st.integers(0, 1000), st.integers(1, 64))
def test_the_pages_of_tokens_are_the_fewest_that_hold_them(num_tokens: int, page_size: int):
    num_pages = pages_of(num_tokens, page_size)
    assert num_pages * page_size >= num_tokens > (num_pages - 1) * page_size
    assert round_up(num_tokens, page_size) == num_pages * page_size
