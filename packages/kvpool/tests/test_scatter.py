# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import re

import pytest

torch = pytest.importorskip("torch")

from pagewood.kvpool.scatter import ScatteredRows, index_pages, locate_slots  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_dtype_keep_their_bits(dtype: str):
    dtype = getattr(torch, dtype)
    array = torch.zeros(4, 3, 5, 8, dtype=torch.uint8).view(dtype)
    bits = torch.randint(0, 256, (2, 5, 8), dtype=torch.uint8)
    rows = ScatteredRows(array)
    index = locate_slots(torch.tensor([7, 2]), page_size=3, num_pages=4)
    rows.write(index, bits.view(dtype))
    for read in (rows.read(index), torch.stack((array[2, 1], array[0, 2]))):
        assert read.dtype == dtype
        assert torch.equal(read.contiguous().view(torch.uint8), bits)
    rows.zero(index_pages(torch.tensor([0, 2]), num_pages=4))
    assert not array.view(torch.uint8).any()


def test_read_returns_a_copy_and_write_changes_the_array():
    array = torch.zeros(2, 6)
    rows = ScatteredRows(array[:, ::2])
    index = index_pages(torch.tensor([1]), num_pages=2)
    before = rows.read(index)
    rows.write(index, torch.ones(1, 6)[:, ::2])
    assert not before.any()
    assert array.tolist() == [[0] * 6, [1, 0] * 3]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("wrong", [-1, 12, -12, 30_000])
def test_an_id_out_of_range_is_refused(dtype, wrong: int):
    ids = torch.tensor([0, wrong, 3], dtype=dtype)
    with pytest.raises(IndexError, match=re.escape(f"pages must be in [0, 12), got {wrong}")):
        index_pages(ids, num_pages=12)
    with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 12), got {wrong}")):
        locate_slots(ids, page_size=4, num_pages=3)


def test_an_empty_list_of_ids_is_accepted():
    pages, offsets = locate_slots(torch.empty(0, dtype=torch.int32), page_size=4, num_pages=3)
    assert len(pages) == len(offsets) == 0
