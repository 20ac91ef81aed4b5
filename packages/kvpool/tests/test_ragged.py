import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.kvpool import ragged_pages


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_request_gets_the_pages_of_its_positions(
    num_rows: int, max_pages: int, page_size: int, data: st.DataObject
):
    table = np.random.default_rng(0).permutation(num_rows * max_pages).reshape(num_rows, max_pages).astype(np.int32)
    rows = data.draw(st.lists(st.integers(0, num_rows - 1)))
    num_tokens = [data.draw(st.integers(1, max_pages * page_size)) for _ in rows]
    ragged = ragged_pages(table, np.array(rows, dtype=np.intp), np.array(num_tokens, np.int32), page_size=page_size)
    for array in (ragged.indptr, ragged.indices, ragged.last_page_len):
        assert array.dtype == np.int32
    assert len(ragged.indices) == ragged.indptr[-1]
    assert len(ragged.last_page_len) == len(rows)
    for i, (row, tokens) in enumerate(zip(rows, num_tokens, strict=True)):
        own = ragged.indices[ragged.indptr[i] : ragged.indptr[i + 1]]
        assert own.tolist() == table[row, : len(own)].tolist()
        assert 1 <= ragged.last_page_len[i] <= page_size
        assert (len(own) - 1) * page_size + ragged.last_page_len[i] == tokens


def test_bad_input_is_refused():
    table, rows = np.zeros((2, 3), dtype=np.int32), np.array([0, 1])
    with pytest.raises(ValueError, match=re.escape("num_tokens must have the shape of rows, (2,), got (1,)")):
        ragged_pages(table, rows, np.array([1], dtype=np.int32), page_size=4)
    for wrong in (0, 13):
        with pytest.raises(ValueError, match=re.escape("num_tokens must be in [1, 12], got")):
            ragged_pages(table, rows, np.array([wrong, 5], dtype=np.int32), page_size=4)
