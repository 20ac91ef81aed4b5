# pyright: basic
# torch is optional here, so it comes from importorskip, which has no types.
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import HybridLayout, LatentLayout, MultiHeadLayout

torch = pytest.importorskip("torch")

from pagewood.kvpool.latent_storage import LatentStorage  # noqa: E402
from pagewood.kvpool.memory import allocate, allocate_groups  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"]
# The largest error of a number in (-4, 4): half a unit in the last place, and for int8 half of 4 / 127.
TOLERANCE = dict(zip(DTYPES, [0, 2**-10, 2**-7, 2**-3, 2**-2, 2 / 126], strict=True))


def make(dtype: str, *, page_size: int = 4, num_pages: int = 6, is_shared: bool = False) -> LatentStorage:
    layout = LatentLayout(num_layers=2, latent_dim=6, rope_dim=3, page_size=page_size, dtype=dtype)
    if not is_shared:
        return LatentStorage(layout, num_pages)
    memory = allocate_groups(HybridLayout(groups=(layout, layout)), num_pages)[1]
    return LatentStorage(layout, num_pages, memory=memory)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(data=st.data())
def test_read_returns_what_was_written(dtype: str, is_shared: bool, data: st.DataObject):
    page_size = data.draw(st.integers(1, 5))
    storage = make(dtype, page_size=page_size, is_shared=is_shared)
    expected = torch.zeros(2, 6 * page_size, 9)
    for _ in range(3):
        layer = data.draw(st.integers(0, 1))
        slots = data.draw(st.lists(st.integers(0, 6 * page_size - 1), unique=True))
        compressed, rotated = torch.rand(len(slots), 6) * 8 - 4, torch.rand(len(slots), 3) * 0.5
        storage.write(layer, compressed, rotated, torch.tensor(slots, dtype=torch.int32))
        expected[layer, slots] = torch.cat((compressed, rotated), dim=-1)
    for layer in range(2):
        compressed, rotated = storage.read(layer, torch.arange(6 * page_size))
        assert torch.allclose(compressed, expected[layer, :, :6], atol=TOLERANCE[dtype], rtol=0)
        assert torch.allclose(rotated, expected[layer, :, 6:], atol=TOLERANCE[dtype] / 8, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_have_the_shapes_of_the_layout(dtype: str):
    storage = make(dtype)
    compressed, rotated = torch.randn(1, 6), torch.randn(1, 3)
    storage.write(1, compressed, rotated, torch.tensor([9]))
    assert storage.layer(1).shape == storage.layout.shape(6)
    assert storage.layer(1).stride() == storage.layout.strides
    assert storage.layer(1).dtype == getattr(torch, dtype)
    parts = storage.parts(1)
    assert [part.shape for part in parts] == [(6, 4, 6), (6, 4, 3)]
    for part, read in zip(parts, storage.read(1, torch.tensor([9])), strict=True):
        codes = part[2, 1].float()
        if dtype == "int8":
            codes *= storage.scales(1)[2, 1, parts.index(part) if part.shape[-1] == 6 else 1]
        assert torch.equal(codes, read[0])
    if dtype != "int8":
        with pytest.raises(ValueError, match=f"layout must be int8 to have scales, got {dtype}"):
            storage.scales(0)


def test_each_part_has_its_own_scale():
    storage = make("int8")
    storage.write(0, torch.full((1, 6), 127.0), torch.full((1, 3), 1.27), torch.tensor([5]))
    assert torch.allclose(storage.scales(0)[1, 1], torch.tensor([1.0, 0.01]))
    assert (storage.layer(0)[1, 1] == 127).all()


def test_bad_input_is_refused():
    storage = make("float32")
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=re.escape("compressed must have shape (2, 6), got (2, 5)")):
        storage.write(0, torch.ones(2, 5), torch.ones(2, 3), slots)
    with pytest.raises(ValueError, match=re.escape("rotated must have shape (2, 3), got (1, 3)")):
        storage.write(0, torch.ones(2, 6), torch.ones(1, 3), slots)
    for wrong in (-1, 24):
        with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {wrong}")):
            storage.write(0, torch.ones(2, 6), torch.ones(2, 3), torch.tensor([0, wrong]))
        with pytest.raises(IndexError, match=re.escape(f"slots must be in [0, 24), got {wrong}")):
            storage.read(0, torch.tensor([0, wrong]))
    assert not storage.layer(0).any()
    with pytest.raises(ValueError, match="num_pages must be >= 1, got 0"):
        make("float32", num_pages=0)
    other = allocate(MultiHeadLayout(num_layers=2, num_kv_heads=1, head_dim=9, page_size=4), 6)
    with pytest.raises(ValueError, match="memory must have"):
        LatentStorage(storage.layout, 6, memory=other)
    with pytest.raises(ValueError, match="memory must have"):
        LatentStorage(storage.layout, 5, memory=storage.memory)


def test_pages_are_copied_zeroed_and_summed():
    storage = make("int8")
    storage.write(1, torch.randn(4, 6), torch.randn(4, 3), torch.arange(8, 12))
    storage.copy_pages(torch.tensor([2]), torch.tensor([0]))
    assert torch.equal(storage.read(1, torch.arange(4))[0], storage.read(1, torch.arange(8, 12))[0])
    assert storage.checksum(0) == storage.checksum(2) != storage.checksum(1)
    storage.zero_pages(torch.tensor([2]))
    assert storage.checksum(2) == storage.checksum(1)
    assert storage.device.type == "cpu"
